package build

import (
	"bufio"
	"io"
	"path"
	"slices"
	"strings"
)

// aptSource is one line of apt's sources: a repository, a suite of it, its components and the key that signs it.
type aptSource struct {
	uri        string
	suite      string
	components []string
	signedBy   string // the path of a keyring, or empty
}

// line spells the source as apt's one-line format has it.
func (s aptSource) line() string {
	opt := ""
	if s.signedBy != "" {
		opt = "[signed-by=" + s.signedBy + "] "
	}
	return "deb " + opt + s.uri + " " + s.suite + " " + strings.Join(s.components, " ")
}

// usable tells sources that a fresh root file system can use as they are: over HTTP, of a suite with components.
func (s aptSource) usable() bool {
	if !strings.HasPrefix(s.uri, "http://") && !strings.HasPrefix(s.uri, "https://") {
		return false
	}
	if s.suite == "" || len(s.components) == 0 || strings.HasSuffix(s.suite, "/") {
		return false
	}
	if s.signedBy != "" && (!path.IsAbs(s.signedBy) || strings.ContainsAny(s.signedBy, "[]\"' \t\n,")) {
		return false
	}
	return !strings.ContainsAny(s.line(), "\n\"'\\")
}

// ofSuite picks the sources of a suite with its updates and security fixes.
func ofSuite(all []aptSource, suite string) []aptSource {
	var out []aptSource
	for _, s := range all {
		switch strings.TrimPrefix(s.suite, suite) {
		case "", "-updates", "-security", "/updates":
			if strings.HasPrefix(s.suite, suite) && s.usable() && !slices.ContainsFunc(out, func(o aptSource) bool {
				return o.line() == s.line()
			}) {
				out = append(out, s)
			}
		}
	}
	if !slices.ContainsFunc(out, func(s aptSource) bool { return s.suite == suite }) {
		return nil // updates of a suite are none
	}
	return out
}

// suitesOf lists what a machine has sources for, for messages.
func suitesOf(all []aptSource) []string {
	var out []string
	for _, s := range all {
		if !s.usable() || strings.ContainsAny(s.suite, "-/") || slices.Contains(out, s.suite) {
			continue
		}
		if len(ofSuite(all, s.suite)) > 0 {
			out = append(out, s.suite)
		}
	}
	slices.Sort(out)
	return out
}

// parseSourcesList reads apt's one-line format. Lines that it does not understand are passed over: they may be right
// for a newer apt.
func parseSourcesList(r io.Reader, arch string) []aptSource {
	var out []aptSource
	for line := range lines(r) {
		line, _, _ = strings.Cut(line, "#")
		rest, ok := strings.CutPrefix(strings.TrimSpace(line), "deb")
		if !ok || rest == "" || (rest[0] != ' ' && rest[0] != '\t' && rest[0] != '[') {
			continue
		}
		rest = strings.TrimSpace(rest)
		var s aptSource
		if inner, ok := strings.CutPrefix(rest, "["); ok {
			opts, after, ok := strings.Cut(inner, "]")
			if !ok {
				continue
			}
			rest = after
			wrongArch := false
			for o := range strings.FieldsSeq(opts) {
				k, v, _ := strings.Cut(o, "=")
				switch strings.TrimRight(strings.ToLower(k), "+-") {
				case "signed-by":
					s.signedBy = v
				case "arch":
					wrongArch = !strings.HasSuffix(k, "-") && !slices.Contains(strings.Split(v, ","), arch)
				}
			}
			if wrongArch {
				continue
			}
		}
		f := strings.Fields(rest)
		if len(f) < 2 {
			continue
		}
		s.uri, s.suite, s.components = f[0], f[1], f[2:]
		out = append(out, s)
	}
	return out
}

// parseDeb822 reads apt's .sources format.
func parseDeb822(r io.Reader, arch string) []aptSource {
	var out []aptSource
	fields := map[string]string{}
	last := ""
	flush := func() {
		defer func() { fields, last = map[string]string{}, "" }()
		if len(fields) == 0 || !slices.Contains(strings.Fields(fields["types"]), "deb") {
			return
		}
		switch strings.ToLower(strings.TrimSpace(fields["enabled"])) {
		case "no", "false", "0", "off", "without", "disable":
			return
		}
		if a := strings.Fields(fields["architectures"]); len(a) > 0 && !slices.Contains(a, arch) {
			return
		}
		signed := strings.TrimSpace(fields["signed-by"])
		if strings.Contains(signed, "-----BEGIN") {
			return // a key inside the file: no path to give to others
		}
		for _, uri := range strings.Fields(fields["uris"]) {
			for _, suite := range strings.Fields(fields["suites"]) {
				out = append(out, aptSource{
					uri: uri, suite: suite, components: strings.Fields(fields["components"]), signedBy: signed,
				})
			}
		}
	}
	for line := range lines(r) {
		switch {
		case strings.HasPrefix(line, "#"):
		case strings.TrimSpace(line) == "":
			flush()
		case line[0] == ' ' || line[0] == '\t':
			if last != "" {
				fields[last] += "\n" + strings.TrimSpace(line)
			}
		default:
			k, v, ok := strings.Cut(line, ":")
			if !ok {
				last = ""
				continue
			}
			last = strings.ToLower(strings.TrimSpace(k))
			fields[last] = strings.TrimSpace(v)
		}
	}
	flush()
	return out
}

// lines gives the lines of at most a MiB.
func lines(r io.Reader) func(func(string) bool) {
	return func(yield func(string) bool) {
		sc := bufio.NewScanner(io.LimitReader(r, 1<<20))
		sc.Buffer(nil, 1<<20)
		for sc.Scan() {
			if !yield(strings.TrimRight(sc.Text(), "\r")) {
				return
			}
		}
	}
}
