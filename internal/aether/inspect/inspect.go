// Package inspect makes the certificates with which Aether ends the TLS of sandboxes whose policy wants that.
//
// Every sandbox has an authority of its own, whose certificate it alone is told to trust. The authority's key is derived
// from one secret of this node and the sandbox's id: it is the same after a restart and stands nowhere.
package inspect

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"os"
	"sync"
	"time"

	"github.com/google/renameio/v2"
)

// How long certificates hold. A leaf is made anew a day before its end; an authority lives as long as a sandbox may.
const (
	holdsAuthority = 5 * 365 * 24 * time.Hour
	holdsLeaf      = 7 * 24 * time.Hour
	renewLeaf      = 24 * time.Hour
	// early allows for clocks that are behind.
	early = time.Hour
)

// mostLeaves is how many certificates are kept of one sandbox.
const mostLeaves = 1024

// secretSize in bytes.
const secretSize = 32

// Authorities are those of all sandboxes of a node. Its methods may be called at once.
type Authorities struct {
	secret []byte
	// key is that of all leaves: it never leaves the process.
	key *ecdsa.PrivateKey

	mu  sync.Mutex
	all map[string]*authority // guarded by mu
}

type authority struct {
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
	pem  []byte

	mu     sync.Mutex
	leaves map[string]*tls.Certificate // guarded by mu
}

// Load reads the node's secret from the file at path, or makes it, for its owner's eyes only.
func Load(path string) (*Authorities, error) {
	secret, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		secret = make([]byte, secretSize)
		if _, err := rand.Read(secret); err != nil {
			return nil, err
		}
		err = renameio.WriteFile(path, secret, 0o600)
	}
	if err != nil {
		return nil, fmt.Errorf("secret of the certificate authorities: %w", err)
	}
	if len(secret) != secretSize {
		return nil, fmt.Errorf("secret of the certificate authorities: %s is damaged; remove it, and end the sandboxes that inspect TLS", path)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	return &Authorities{secret: secret, key: key, all: map[string]*authority{}}, nil
}

// PEM is the certificate of a sandbox's authority.
func (a *Authorities) PEM(id string) ([]byte, error) {
	ca, err := a.of(id)
	if err != nil {
		return nil, err
	}
	return ca.pem, nil
}

// Forget drops what is kept of a sandbox.
func (a *Authorities) Forget(id string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.all, id)
}

func (a *Authorities) of(id string) (*authority, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if ca := a.all[id]; ca != nil {
		return ca, nil
	}
	key, err := derive(a.secret, id)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	t := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: "Sandsea Aether, sandbox " + id},
		NotBefore:    now.Add(-early), NotAfter: now.Add(holdsAuthority),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	ca := &authority{
		key: key, cert: cert, leaves: map[string]*tls.Certificate{},
		pem: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
	}
	a.all[id] = ca
	return ca, nil
}

// derive gives the key of a sandbox's authority: the first of its row of candidates that is a scalar of the curve, which
// all but one in 2^32 are.
func derive(secret []byte, id string) (*ecdsa.PrivateKey, error) {
	for n := range 8 {
		raw, err := hkdf.Key(sha256.New, secret, nil, fmt.Sprintf("sandsea aether authority %d of sandbox %s", n, id), 32)
		if err != nil {
			return nil, err
		}
		if key, err := ecdsa.ParseRawPrivateKey(elliptic.P256(), raw); err == nil {
			return key, nil
		}
	}
	return nil, errors.New("no key can be derived")
}

// Certificate is the one with which Aether answers for a host name, in lower case, to a sandbox.
func (a *Authorities) Certificate(id, name string) (*tls.Certificate, error) {
	ca, err := a.of(id)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	ca.mu.Lock()
	defer ca.mu.Unlock()
	if c := ca.leaves[name]; c != nil && now.Before(c.Leaf.NotAfter.Add(-renewLeaf)) {
		return c, nil
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	t := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{Organization: []string{"Sandsea Aether"}},
		DNSNames:     []string{name},
		NotBefore:    now.Add(-early), NotAfter: now.Add(holdsLeaf),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, t, ca.cert, a.key.Public(), ca.key)
	if err != nil {
		return nil, err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	if len(ca.leaves) >= mostLeaves {
		clear(ca.leaves)
	}
	c := &tls.Certificate{Certificate: [][]byte{der, ca.cert.Raw}, PrivateKey: a.key, Leaf: leaf}
	ca.leaves[name] = c
	return c, nil
}
