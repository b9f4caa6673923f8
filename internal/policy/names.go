package policy

import (
	"math"
	"strings"
)

// hostName gives the canonical form of a host name: lower case, no dot at the end. Names are of letters, digits, "-" and
// "_", labels of at most 63 bytes, 253 together; a last label that is a number makes an address of some notation
// (127.1, 0x7f000001), which is no name.
func hostName(s string) (string, bool) {
	s = strings.TrimSuffix(s, ".")
	if s == "" || len(s) > 253 {
		return "", false
	}
	upper := false
	label := 0 // where the label begins
	for i := 0; i <= len(s); i++ {
		if i == len(s) || s[i] == '.' {
			if i == label || i-label > 63 || s[label] == '-' || s[i-1] == '-' {
				return "", false
			}
			if i == len(s) && isNumber(s[label:]) {
				return "", false
			}
			label = i + 1
			continue
		}
		switch c := s[i]; {
		case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c == '-', c == '_':
		case 'A' <= c && c <= 'Z':
			upper = true
		default:
			return "", false
		}
	}
	if upper {
		s = strings.ToLower(s)
	}
	return s, true
}

// IsName reports whether rules can be about a host name. About others nothing can be said but that no rule allows them.
func IsName(s string) bool {
	_, ok := hostName(s)
	return ok
}

// isNumber reports whether some resolver would read a label as a number, decimal or hexadecimal.
func isNumber(label string) bool {
	if hex, ok := strings.CutPrefix(strings.ToLower(label), "0x"); ok {
		return strings.Trim(hex, "0123456789abcdef") == ""
	}
	return strings.Trim(label, "0123456789") == ""
}

// matchDomain reports whether a rule's domain covers a name, both canonical.
func matchDomain(domain, name string) bool {
	if domain == "*" {
		return true
	}
	if below, ok := strings.CutPrefix(domain, "*."); ok {
		rest, ok := strings.CutSuffix(name, below)
		return ok && len(rest) > 1 && rest[len(rest)-1] == '.'
	}
	return domain == name
}

// canonicalDomain is hostName for what a rule may hold: wildcards as "*" and "*.name".
func canonicalDomain(s string) (string, bool) {
	if s == "*" {
		return s, true
	}
	rest, wild := strings.CutPrefix(s, "*.")
	name, ok := hostName(rest)
	if !ok || len(name) > 251 {
		return "", false
	}
	if wild {
		return "*." + name, true
	}
	return name, true
}

// Parameters of Punycode (RFC 3492, section 5).
const (
	punyBase, punyTMin, punyTMax, punySkew, punyDamp = 36, 1, 26, 38, 700
	punyBias, punyFirst                              = 72, 0x80
)

// isPunycode reports whether what follows "xn--" is the encoding of some label beyond ASCII, in the one spelling that
// encoders give.
func isPunycode(s string) bool {
	runes, ok := decodePunycode(s)
	if !ok {
		return false
	}
	beyond := false
	for _, r := range runes {
		beyond = beyond || r >= punyFirst
	}
	return beyond && encodePunycode(runes) == s
}

func decodePunycode(s string) ([]rune, bool) {
	var out []rune
	rest := s
	if i := strings.LastIndexByte(s, '-'); i >= 0 {
		out, rest = []rune(s[:i]), s[i+1:]
	}
	n, i, bias := rune(punyFirst), 0, punyBias
	for rest != "" {
		start, w := i, 1
		for k := punyBase; ; k += punyBase {
			if rest == "" {
				return nil, false
			}
			d, ok := punyDigit(rest[0])
			rest = rest[1:]
			if !ok || d > (math.MaxInt32-i)/w {
				return nil, false
			}
			i += d * w
			t := threshold(k, bias)
			if d < t {
				break
			}
			if w > math.MaxInt32/(punyBase-t) {
				return nil, false
			}
			w *= punyBase - t
		}
		bias = adapt(i-start, len(out)+1, start == 0)
		if i/(len(out)+1) > math.MaxInt32-int(n) {
			return nil, false
		}
		n += rune(i / (len(out) + 1))
		i %= len(out) + 1
		if n > 0x10ffff || 0xd800 <= n && n < 0xe000 {
			return nil, false
		}
		out = append(out[:i], append([]rune{n}, out[i:]...)...)
		i++
	}
	return out, true
}

func encodePunycode(in []rune) string {
	var out []byte
	for _, r := range in {
		if r < punyFirst {
			out = append(out, byte(r))
		}
	}
	basic := len(out)
	if basic > 0 {
		out = append(out, '-')
	}
	n, delta, bias := rune(punyFirst), 0, punyBias
	for done := basic; done < len(in); {
		next := rune(math.MaxInt32)
		for _, r := range in {
			if r >= n {
				next = min(next, r)
			}
		}
		delta += int(next-n) * (done + 1)
		n = next
		for _, r := range in {
			if r < n {
				delta++
			}
			if r != n {
				continue
			}
			q := delta
			for k := punyBase; ; k += punyBase {
				t := threshold(k, bias)
				if q < t {
					break
				}
				out = append(out, punyLetter(t+(q-t)%(punyBase-t)))
				q = (q - t) / (punyBase - t)
			}
			out = append(out, punyLetter(q))
			bias = adapt(delta, done+1, done == basic)
			delta = 0
			done++
		}
		delta++
		n++
	}
	return string(out)
}

func threshold(k, bias int) int { return max(punyTMin, min(punyTMax, k-bias)) }

func adapt(delta, points int, first bool) int {
	if first {
		delta /= punyDamp
	} else {
		delta /= 2
	}
	delta += delta / points
	k := 0
	for ; delta > (punyBase-punyTMin)*punyTMax/2; k += punyBase {
		delta /= punyBase - punyTMin
	}
	return k + (punyBase-punyTMin+1)*delta/(delta+punySkew)
}

func punyDigit(c byte) (int, bool) {
	switch {
	case 'a' <= c && c <= 'z':
		return int(c - 'a'), true
	case '0' <= c && c <= '9':
		return int(c-'0') + 26, true
	}
	return 0, false
}

func punyLetter(d int) byte {
	if d < 26 {
		return byte('a' + d)
	}
	return byte('0' + d - 26)
}
