"""The three logs as tables: the data source `delaylog`, row by row as they stand in the files."""
