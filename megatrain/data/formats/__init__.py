"""The formats of rows: each is read as an example, and a row that holds something else is reported."""
