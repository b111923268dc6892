"""What the bench times: contestants, and the table of cases with the ratio each should reach."""
