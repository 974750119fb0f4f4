"""The prefetcher: reads hints and brings pages back before the scheduler needs them.

Empty in this release: a later one adds the planner and its thread. The store works without it, and hints then
answer ``HintResult.REJECTED``.
"""
