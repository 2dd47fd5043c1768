"""What a row holds, by its format, as an example; a row that holds something else is said to."""
