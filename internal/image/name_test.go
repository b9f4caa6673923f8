package image_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/image"
)

func TestDigests(t *testing.T) {
	hex := strings.Repeat("0af", 21) + "0"
	if d, err := image.ParseDigest("sha256:" + hex); err != nil || d.Hex() != hex {
		t.Errorf("%s, %v", d, err)
	}
	for _, bad := range []string{
		"", "sha256:", hex, "sha256:" + hex[1:], "sha256:" + strings.ToUpper(hex), "sha512:" + hex, "sha256:" + hex + "0",
		"sha256:../../" + hex[6:],
	} {
		if _, err := image.ParseDigest(bad); !errors.Is(err, errdefs.Invalid) {
			t.Errorf("%q: got %v, want Invalid", bad, err)
		}
	}
}
