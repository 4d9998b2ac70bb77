"""Names of the harness as the planner's comparison imports them."""

from benchmarks.harness import HERE, Parser, fact_list, markdown_table, read_results
from benchmarks.harness import measurement_facts as circumstances
from benchmarks.harness import write_page as write_table

__all__ = ["HERE", "Parser", "circumstances", "fact_list", "markdown_table", "read_results", "write_table"]
