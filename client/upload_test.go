package client_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
)

// TestACancelledUploadNeverLooksWhole reads, at the server's side, the bodies of uploads that their callers give up: each
// must break off, none may end in good order.
func TestACancelledUploadNeverLooksWhole(t *testing.T) {
	ends := make(chan error, 1)
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, err := io.Copy(io.Discard, r.Body)
		ends <- err
	}))
	defer srv.Close()
	c, err := client.New(client.Config{URL: srv.URL, Token: "t"})
	if err != nil {
		t.Fatal(err)
	}
	for range 50 {
		ctx, cancel := context.WithCancelCause(t.Context())
		given := 0
		_, err := c.Sandbox("s").WriteFile(ctx, &sandseav1.WriteFileHeader{Path: "/f"}, reader(func(p []byte) (int, error) {
			if given += len(p); given > 1<<20 {
				cancel(errors.New("changed my mind"))
			}
			return len(p), nil
		}))
		if err == nil {
			t.Fatal("a cancelled upload succeeded")
		}
		select {
		case err := <-ends:
			if err == nil {
				t.Fatal("the server saw a whole body")
			}
		case <-time.After(10 * time.Second):
			t.Fatal("the upload did not end")
		}
	}
}

type reader func([]byte) (int, error)

func (r reader) Read(p []byte) (int, error) { return r(p) }
