"""The command line: plan, bench, report, inspect, convert, doctor."""
