package cluster

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"strings"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
)

// Role is what a certificate lets its holder be.
type Role string

// The roles.
const (
	// Server may call everything on every node.
	Server Role = "server"
	// Node may keep its own records in the store and read layers from other nodes.
	Node Role = "node"
)

// The names in certificates. They are no addresses: nobody looks them up.
const (
	serverName = "server.sandsea.internal"
	nodeSuffix = ".node.sandsea.internal"
)

// Peer is who stands at the other end of a line.
type Peer struct {
	Role Role
	// Name of the node, empty for a server.
	Name string
}

// Identity is a certificate with its key, and the authority that others are judged by.
type Identity struct {
	Peer
	// Expires is when the certificate ends.
	Expires time.Time

	pair        tls.Certificate
	authorities *x509.CertPool
}

// newIdentity reads PEM. The certificate must be the authority's and belong to the key.
func newIdentity(ca, cert, key []byte) (*Identity, error) {
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, err
	}
	id := &Identity{pair: pair, authorities: x509.NewCertPool(), Expires: pair.Leaf.NotAfter}
	if !id.authorities.AppendCertsFromPEM(ca) {
		return nil, errors.New("no certificate of an authority")
	}
	_, err = pair.Leaf.Verify(x509.VerifyOptions{
		Roots: id.authorities, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}, CurrentTime: pair.Leaf.NotBefore,
	})
	if err != nil {
		return nil, err
	}
	id.Peer, err = peerOf(pair.Leaf)
	return id, err
}

// ValidAt refuses a certificate that has ended or not begun, which every other end would refuse; FailedPrecondition.
func (i *Identity) ValidAt(now time.Time) error {
	object, stamp := "certificate of the server", func(t time.Time) string { return t.UTC().Format(time.RFC3339) }
	if i.Role == Node {
		object = "certificate of node " + i.Name
	}
	switch begins := i.pair.Leaf.NotBefore; {
	case now.After(i.Expires):
		return errdefs.New(errdefs.FailedPrecondition, object, "ended at %s with the cluster's authority, now is %s", stamp(i.Expires), stamp(now)).
			WithHint("Set the clock, or make a new authority and invite every node again: docs/CLUSTER.md, Trust")
	case now.Before(begins):
		return errdefs.New(errdefs.FailedPrecondition, object, "begins at %s, now is %s", stamp(begins), stamp(now)).
			WithHint("Set this machine's clock, or that of the machine that made it and make another")
	}
	return nil
}

// DialServer is how to reach a server.
func (i *Identity) DialServer() *tls.Config { return i.dial(serverName) }

// DialNode is how to reach the node of that name.
func (i *Identity) DialNode(name string) *tls.Config { return i.dial(name + nodeSuffix) }

func (i *Identity) dial(name string) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{i.pair}, RootCAs: i.authorities, ServerName: name,
	}
}

// Accept is how to answer those of the same cluster, and nobody else. PeerOf says who it is.
func (i *Identity) Accept() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{i.pair}, ClientCAs: i.authorities,
		ClientAuth: tls.RequireAndVerifyClientCert,
	}
}

// PeerOf tells who called on a line that Accept has checked. The kind Denied: nobody that we know of.
func PeerOf(state *tls.ConnectionState) (Peer, error) {
	if state == nil || len(state.VerifiedChains) == 0 || len(state.VerifiedChains[0]) == 0 {
		return Peer{}, errdefs.New(errdefs.Denied, "caller", "it showed no certificate of this cluster")
	}
	return peerOf(state.VerifiedChains[0][0])
}

func peerOf(cert *x509.Certificate) (Peer, error) {
	if len(cert.DNSNames) == 1 {
		name := cert.DNSNames[0]
		if name == serverName {
			return Peer{Role: Server}, nil
		}
		if name, ok := strings.CutSuffix(name, nodeSuffix); ok && CheckName(name) == nil {
			return Peer{Role: Node, Name: name}, nil
		}
	}
	return Peer{}, errdefs.New(errdefs.Denied, "certificate", "has no role in a cluster")
}

// CheckName checks the name of a node: a label of a domain name in lower case.
func CheckName(name string) error {
	const letters = "abcdefghijklmnopqrstuvwxyz0123456789"
	if name == "" || len(name) > 63 || strings.Trim(name, letters+"-") != "" || strings.Trim(name, "-") != name {
		return errdefs.New(errdefs.Invalid, "", "node name %.64q: is none", name).WithField("name", "63 letters").
			WithHint("Use a to z, digits and hyphens, as n2 or rack7-3")
	}
	return nil
}

func encodePEM(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}
