package inspect_test

import (
	"crypto/x509"
	"os"
	"path/filepath"
	"testing"

	"github.com/sandsea/sandsea/internal/aether/inspect"
)

func pool(t *testing.T, a *inspect.Authorities, id string) *x509.CertPool {
	t.Helper()
	pem, err := a.PEM(id)
	if err != nil {
		t.Fatal(err)
	}
	p := x509.NewCertPool()
	if !p.AppendCertsFromPEM(pem) {
		t.Fatalf("no certificate in %q", pem)
	}
	return p
}

func TestASandboxTrustsItsOwnAuthorityAloneAlsoAfterARestart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "authorities")
	before, err := inspect.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	trusted, others := pool(t, before, "one"), pool(t, before, "two")
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("the secret's file: %v, %v", fi.Mode(), err)
	}
	after, err := inspect.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range []*inspect.Authorities{before, after} {
		c, err := a.Certificate("one", "api.example")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Leaf.Verify(x509.VerifyOptions{DNSName: "api.example", Roots: trusted}); err != nil {
			t.Errorf("the sandbox does not trust its certificate: %v", err)
		}
		if _, err := c.Leaf.Verify(x509.VerifyOptions{DNSName: "api.example", Roots: others}); err == nil {
			t.Error("another sandbox trusts it")
		}
		if _, err := c.Leaf.Verify(x509.VerifyOptions{DNSName: "other.example", Roots: trusted}); err == nil {
			t.Error("it stands for another name")
		}
		again, _ := a.Certificate("one", "api.example")
		if again != c {
			t.Error("it was made twice")
		}
	}
}

func TestADamagedSecretIsNamed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "authorities")
	if err := os.WriteFile(path, []byte("short"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := inspect.Load(path); err == nil {
		t.Error("loaded")
	}
}
