package network

import "context"

// Recall asks for the counters once.
func (n *Network) Recall(ctx context.Context) { n.remember(ctx) }
