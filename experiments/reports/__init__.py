"""What the results of each study say: words, tables and pictures, made from results.json alone."""
