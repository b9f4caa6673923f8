package upstream

import (
	"fmt"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"

	"github.com/sandsea/sandsea/api/errdefs"
)

// Setting is what an operator says of one service: [services.<name>] in aether.toml. What it does not say is discovered.
type Setting struct {
	// URLs instead of the discovered ones; see Upstream.
	URLs []string `toml:"urls"`
	// Files are further URLs below which the service's artefacts lie.
	Files []string `toml:"files"`
	// Checksums is golang's checksum database, as GOSUMDB; "off" for none.
	Checksums string `toml:"checksums"`
	// User and the file of a password for all URLs.
	User         string `toml:"user"`
	PasswordFile string `toml:"password_file"`
	// Header for all URLs and the file of its value: "Authorization" and a file with "Bearer ...".
	Header    string `toml:"header"`
	ValueFile string `toml:"value_file"`
}

// Validate tells what is wrong with a Setting, naming its fields. It opens no files.
func (s Setting) Validate(service string) error {
	bad := func(field, format string, args ...any) *errdefs.Error {
		return errdefs.New(errdefs.Invalid, "aether.toml", format, args...).WithField("services."+service+"."+field, "")
	}
	if !slices.Contains(services, service) {
		return bad("", "there is no service %q", service).WithHint("The services are %s", strings.Join(services, ", "))
	}
	for field, list := range map[string][]string{"urls": s.URLs, "files": s.Files} {
		for _, raw := range list {
			if _, _, err := take(raw); err != nil {
				return bad(field, "%v", err)
			}
		}
	}
	switch {
	case (s.User == "") != (s.PasswordFile == ""):
		return bad("user", "user and password_file go together")
	case (s.Header == "") != (s.ValueFile == ""):
		return bad("header", "header and value_file go together")
	case s.Checksums != "" && service != "golang":
		return bad("checksums", "only golang has a checksum database")
	}
	if s.Header != "" {
		if err := checkHeader(s.Header); err != nil {
			return bad("header", "%v", err)
		}
	}
	return nil
}

// apply puts the operator's words over what was discovered.
func (s Setting) apply(service string, u Upstream) (Upstream, error) {
	if err := s.Validate(service); err != nil {
		return u, err
	}
	if len(s.URLs) > 0 {
		u = Upstream{Found: "aether.toml", Checksums: u.Checksums}
	}
	if s.Checksums != "" {
		u.Checksums = s.Checksums
	}
	if u.Checksums == "off" {
		u.Checksums = ""
	}
	for _, raw := range s.URLs {
		u.add(raw)
	}
	for _, raw := range s.Files {
		plain, c, _ := take(raw) // validated
		u.Files = append(u.Files, plain)
		if c != nil {
			u.Credentials = append(u.Credentials, *c)
		}
	}
	var own []Credential
	for _, raw := range slices.Concat(u.URLs, u.Files) {
		p, err := url.Parse(raw)
		if err != nil {
			return u, fmt.Errorf("aether.toml: services.%s.urls: %w", service, err)
		}
		if s.User != "" {
			pass, err := secret(s.PasswordFile)
			if err != nil {
				return u, fmt.Errorf("aether.toml: services.%s.password_file: %w", service, err)
			}
			own = append(own, Basic(origin(p), "", s.User, pass))
		}
		if s.Header != "" {
			value, err := secret(s.ValueFile)
			if err != nil {
				return u, fmt.Errorf("aether.toml: services.%s.value_file: %w", service, err)
			}
			own = append(own, Credential{Origin: origin(p), Header: s.Header, Value: value})
		}
	}
	for _, c := range own {
		// The operator's word is the only one.
		u.Credentials = slices.DeleteFunc(u.Credentials, func(d Credential) bool {
			return d != c && d.Origin == c.Origin && http.CanonicalHeaderKey(d.Header) == http.CanonicalHeaderKey(c.Header)
		})
		if !slices.Contains(u.Credentials, c) {
			u.Credentials = append(u.Credentials, c)
		}
	}
	return u, nil
}

// add takes a URL of the service: http or https, without its user and password, which become a Credential.
func (u *Upstream) add(raw string) {
	plain, c, err := take(raw)
	if err != nil || slices.Contains(u.URLs, plain) {
		return
	}
	u.URLs = append(u.URLs, plain)
	if c != nil {
		u.Credentials = append(u.Credentials, *c)
	}
}

// maxSecret bounds a secret's file.
const maxSecret = 64 << 10

// secret reads the one line of a file.
func secret(path string) (string, error) {
	b, err := readFile(path, maxSecret)
	if err != nil {
		return "", err
	}
	s := strings.TrimSpace(string(b))
	if s == "" || strings.ContainsAny(s, "\r\n\x00") {
		return "", errdefs.New(errdefs.Invalid, path, "does not hold one line of text")
	}
	return s, nil
}

// readFile reads a whole small file.
func readFile(path string, limit int64) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > limit {
		return nil, errdefs.New(errdefs.Invalid, path, "is not a file of at most %d bytes", limit)
	}
	return os.ReadFile(path)
}
