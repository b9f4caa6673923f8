package keeper

import "testing"

// FreshKeeper starts a keeper process for the suite, which lies outside this package.
func FreshKeeper(t *testing.T) func(*testing.T) Client {
	p := startKeeper(t, t.TempDir())
	return func(t *testing.T) Client { return p.dial(t) }
}
