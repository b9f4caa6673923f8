package image

import (
	"strings"

	"github.com/sandsea/sandsea/api/errdefs"
)

// MaxName is the longest name of an image in bytes.
const MaxName = 255

// nameRest are the bytes that a name may have beside letters and digits, after its first.
const nameRest = "._-/:@+,=~"

// CheckName refuses what cannot name an image. A name begins with a letter or digit, as "debian:bookworm+git,python3"
// or "registry.example/team/app:1.2", and is never read as a digest.
func CheckName(s string) error {
	bad := func(why string) error {
		return errdefs.New(errdefs.Invalid, "image", "%q is no name: %s", clip(s), why).WithField("name", "").
			WithHint("Use letters, digits and %s, at most %d", nameRest, MaxName)
	}
	switch {
	case s == "":
		return bad("it is empty")
	case len(s) > MaxName:
		return bad("it is too long")
	case !alphanumeric(s[0]):
		return bad("it begins with neither a letter nor a digit")
	case strings.HasPrefix(s, "sha256:"):
		return bad("it looks like a digest")
	}
	for i := range len(s) {
		if !alphanumeric(s[i]) && !strings.ContainsRune(nameRest, rune(s[i])) {
			return bad("it has a byte that names do not have")
		}
	}
	for part := range strings.SplitSeq(s, "/") {
		if part == "" || part == "." || part == ".." {
			return bad("it has an empty part")
		}
	}
	return nil
}

func alphanumeric(b byte) bool {
	return b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z' || b >= '0' && b <= '9'
}
