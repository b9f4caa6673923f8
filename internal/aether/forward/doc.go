// Package forward carries the connections of sandboxes to the hosts that they mean.
//
// A connection comes with a Target: the name that its address stands for (package names), the name that a proxy was told,
// or an address that a rule opens. The target is judged before anything is dialled, and the connection is then what its
// first bytes make it:
//
//   - TLS: the server name in the ClientHello must be the target's name; without one, or with another, the connection is
//     reset. It then passes as it is. With inspect_tls it is ended here and its requests are treated as HTTP.
//   - HTTP/1 and HTTP/2 without TLS: every request is read here and sent anew, if its host is the target's name. Nothing
//     that two servers could understand in different ways gets through, since nothing passes as it is.
//   - Anything else passes as it is, on ports other than 80: to the target and nowhere else.
//
// On ports other than 80 and 443 the server may speak first, and a client may pause in its first words; what it says
// after that is looked at all the same. To an address, connections pass as they are; only where rules reject names, those
// in TLS and HTTP are asked for as well.
//
// Requests and connections to the hosts of package services are answered by the service.
//
// Every connection is a roster.Flow: it counts, and is cut with a reset when the policy does not allow it any more. What
// ends on one side is ended on the other, each direction for itself; what is reset is reset.
package forward
