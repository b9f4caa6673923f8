package cluster

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"time"

	"github.com/google/renameio/v2"

	"github.com/sandsea/sandsea/api/errdefs"
)

const (
	// lifetime of the authority; no certificate of it lasts longer.
	lifetime = 10 * 365 * 24 * time.Hour
	// backdate allows for clocks that differ.
	backdate = time.Hour
)

// The files of an authority.
const (
	caCert    = "ca.crt"
	caKey     = "ca.key"
	storeFile = "store"
)

// Authority makes the certificates of one cluster. It lives in a directory of the server's machine, mode 0700, files
// 0600: who can read it is every server and every node.
type Authority struct {
	dir  string
	cert *x509.Certificate
	pem  []byte
	key  *ecdsa.PrivateKey
}

// OpenAuthority reads the authority in dir; the kind NotFound when there is none.
func OpenAuthority(dir string) (*Authority, error) {
	cert, err := os.ReadFile(filepath.Join(dir, caCert))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errdefs.New(errdefs.NotFound, dir, "holds no authority of a cluster").
			WithHint("Start sandsea server on this data directory first")
	}
	if err != nil {
		return nil, fmt.Errorf("read the authority: %w", err)
	}
	key, err := os.ReadFile(filepath.Join(dir, caKey))
	if err != nil {
		return nil, fmt.Errorf("read the authority's key: %w", err)
	}
	a := &Authority{dir: dir, pem: cert}
	damaged := func(err error) error {
		return errdefs.New(errdefs.DataLoss, dir, "the authority is damaged: %v", err).WithHint("Restore it from a backup").Wrap(err)
	}
	block, _ := pem.Decode(cert)
	if block == nil {
		return nil, damaged(errors.New("no certificate"))
	}
	if a.cert, err = x509.ParseCertificate(block.Bytes); err != nil {
		return nil, damaged(err)
	}
	if block, _ = pem.Decode(key); block == nil {
		return nil, damaged(errors.New("no key"))
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, damaged(err)
	}
	private, ok := parsed.(*ecdsa.PrivateKey)
	if !ok || !private.PublicKey.Equal(a.cert.PublicKey) {
		return nil, damaged(errors.New("the key is another's"))
	}
	a.key = private
	return a, nil
}

// EnsureAuthority is OpenAuthority that makes one in a dir without.
func EnsureAuthority(dir string, now time.Time) (*Authority, error) {
	a, err := OpenAuthority(dir)
	if !errors.Is(err, errdefs.NotFound) {
		return a, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the authority: %w", err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make the authority: %w", err)
	}
	template, err := blank("sandsea cluster", now, now.Add(lifetime))
	if err != nil {
		return nil, err
	}
	template.IsCA, template.BasicConstraintsValid, template.MaxPathLenZero = true, true, true
	template.KeyUsage = x509.KeyUsageCertSign
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make the authority: %w", err)
	}
	keyPEM, err := encodeKey(key)
	if err != nil {
		return nil, err
	}
	// The certificate last: it says that the authority is whole.
	for _, f := range []struct {
		name string
		body []byte
	}{{caKey, keyPEM}, {caCert, encodePEM("CERTIFICATE", der)}} {
		if err := renameio.WriteFile(filepath.Join(dir, f.name), f.body, 0o600); err != nil {
			return nil, fmt.Errorf("keep the authority: %w", err)
		}
	}
	return OpenAuthority(dir)
}

func blank(name string, from, to time.Time) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, fmt.Errorf("make a serial number: %w", err)
	}
	return &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name}, NotBefore: from.Add(-backdate), NotAfter: to,
	}, nil
}

func encodeKey(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encode a key: %w", err)
	}
	return encodePEM("PRIVATE KEY", der), nil
}

// issue makes a certificate for one name, as good as the authority itself.
func (a *Authority) issue(name string, now time.Time) (cert, key []byte, err error) {
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("make a key: %w", err)
	}
	template, err := blank(name, now, a.cert.NotAfter)
	if err != nil {
		return nil, nil, err
	}
	template.DNSNames = []string{name}
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, k.Public(), a.key)
	if err != nil {
		return nil, nil, fmt.Errorf("make a certificate for %s: %w", name, err)
	}
	if key, err = encodeKey(k); err != nil {
		return nil, nil, err
	}
	return encodePEM("CERTIFICATE", der), key, nil
}

// Server makes a new certificate for a server of this cluster, which is kept nowhere.
func (a *Authority) Server(now time.Time) (*Identity, error) {
	cert, key, err := a.issue(serverName, now)
	if err != nil {
		return nil, err
	}
	return newIdentity(a.pem, cert, key)
}

// SetStore remembers where nodes find the store, for the invitations.
func (a *Authority) SetStore(address string) error {
	if err := renameio.WriteFile(filepath.Join(a.dir, storeFile), []byte(address+"\n"), 0o600); err != nil {
		return fmt.Errorf("keep the store's address: %w", err)
	}
	return nil
}
