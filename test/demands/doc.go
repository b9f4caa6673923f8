// Package demands checks, by number, what agent and training frameworks demand of a sandbox: D1 to D40. Every demand has
// a function here, over the public API of one real server; what a later step brings is skipped with its reason. What
// only shows in Python is in sdk/python/tests/test_demands.py.
package demands
