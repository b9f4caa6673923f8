package sandboxpb

// A tunnel to a port inside a sandbox is asked for at TunnelPath of a node's door, as an upgrade to TunnelProtocol.
const (
	TunnelPath     = "/node.v1.EdgeService/Tunnel"
	TunnelProtocol = "sandsea-tunnel"
)
