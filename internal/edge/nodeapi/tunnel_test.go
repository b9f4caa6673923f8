package nodeapi_test

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"io"
	"math/big"
	"net"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/edge/nodeapi"
	"github.com/sandsea/sandsea/internal/edge/runner/edgetest"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// TestATunnelEndsWithWhoOpenedIt hangs up on a server inside that never closes its half, after the other half has ended.
func TestATunnelEndsWithWhoOpenedIt(t *testing.T) {
	for name, pair := range map[string]func(*testing.T) (net.Conn, net.Conn){"unix": unixPair, "tls": tlsPair} {
		t.Run(name, func(t *testing.T) {
			caller, outside := pair(t)
			server, inside := tcpPair(t)
			done := make(chan struct{})
			go func() {
				nodeapi.Join(outside, inside)
				close(done)
			}()
			if _, err := io.WriteString(caller, "question"); err != nil {
				t.Fatal(err)
			}
			if err := caller.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
				t.Fatal(err)
			}
			if b, err := io.ReadAll(server); err != nil || string(b) != "question" {
				t.Fatalf("%q, %v", b, err)
			}
			// Half of it is open still.
			answer := make([]byte, 6)
			if _, err := io.WriteString(server, "answer"); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(caller, answer); err != nil || string(answer) != "answer" {
				t.Fatalf("%q, %v", answer, err)
			}
			select {
			case <-done:
				t.Fatal("the tunnel ended with the first half")
			case <-time.After(50 * time.Millisecond):
			}
			caller.Close()
			wait.Until(t, edgetest.Patience, func() bool {
				select {
				case <-done:
					return true
				default:
					return false
				}
			}, "the end of the tunnel")
		})
	}
}

func accepted(t *testing.T, network, address string) (dialled, taken net.Conn) {
	t.Helper()
	ln, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	if dialled, err = net.Dial(network, ln.Addr().String()); err == nil {
		taken, err = ln.Accept()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dialled.Close(); taken.Close() })
	return dialled, taken
}

func unixPair(t *testing.T) (net.Conn, net.Conn) {
	return accepted(t, "unix", filepath.Join(t.TempDir(), "s"))
}

func tcpPair(t *testing.T) (net.Conn, net.Conn) {
	return accepted(t, "tcp", netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), 0).String())
}

func tlsPair(t *testing.T) (net.Conn, net.Conn) {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "n"}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	dialled, taken := tcpPair(t)
	c := tls.Client(dialled, &tls.Config{InsecureSkipVerify: true}) //nolint:gosec // a test's own other end
	s := tls.Server(taken, &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}})
	go func() { _ = c.Handshake() }()
	if err := s.Handshake(); err != nil {
		t.Fatal(err)
	}
	return c, s
}
