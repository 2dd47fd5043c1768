"""Published rates of other systems, each with its settings, and what the planner says of them.

`rows.json` names the rows: the system, what is known of how it trains, the model, the batch, and the tokens
per second. One row per machine is fitted (`is_fitted`): the machine's rate of matrix products is chosen so
that the planner gives its figure; every other row is predicted. Rows that are left out say why: settings
unknown, stale updates. Rows of more than 131,072 tokens are in `long.json`, and `long` predicts them and
plans ours beside them. Figures of several GPUs are in `scaling.json`, and `scaling` predicts them.
"""
