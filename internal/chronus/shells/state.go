package shells

import (
	"bytes"
	_ "embed"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/sandsea/sandsea/internal/chronus"
)

// The kinds of interpreter.
const (
	kindBash = "bash"
	kindSh   = "sh" // any other POSIX shell
)

// state is what one command leaves to the next. Its texts are script that a shell wrote for shells to read, of a form
// that has been checked. Nil and empty are the same.
type state struct {
	Cwd       []byte   `json:"cwd"`
	Umask     string   `json:"umask"`
	Status    int      `json:"status,omitempty"` // what $? is next
	Variables []byte   `json:"variables,omitempty"`
	Functions []byte   `json:"functions,omitempty"` // with their attributes, any text
	Aliases   []byte   `json:"aliases,omitempty"`
	Shopt     []string `json:"shopt,omitempty"`   // -s NAME or -u NAME, all of them
	Options   []string `json:"options,omitempty"` // those of set that are on
}

func (s state) size() int { return len(s.Variables) + len(s.Functions) + len(s.Aliases) + len(s.Cwd) }

func (s state) equal(o state) bool {
	return s.Status == o.Status && s.Umask == o.Umask && bytes.Equal(s.Cwd, o.Cwd) &&
		bytes.Equal(s.Variables, o.Variables) && bytes.Equal(s.Functions, o.Functions) &&
		bytes.Equal(s.Aliases, o.Aliases) && slices.Equal(s.Shopt, o.Shopt) && slices.Equal(s.Options, o.Options)
}

// dump is what came back from a shell.
type dump struct {
	kind        string
	state       state
	interpreter string
	syntax      bool
}

// sections cuts what came back into its parts. False when it is not complete.
func sections(raw []byte, token string) (map[string][]byte, bool) {
	if i := bytes.IndexByte(raw, 0); i >= 0 {
		raw = raw[:i]
	}
	out := map[string][]byte{}
	head := []byte(token + " ")
	name := ""
	begin, at := 0, 0
	for at < len(raw) {
		end := bytes.IndexByte(raw[at:], '\n')
		if end < 0 {
			return nil, false // every line has an end
		}
		end += at
		if bytes.HasPrefix(raw[at:], head) {
			if name == "" && at > 0 {
				return nil, false
			}
			if name != "" {
				out[name] = raw[begin:at]
			}
			name, begin = string(raw[at+len(head):end]), end+1
			if _, twice := out[name]; twice || name == "" {
				return nil, false
			}
		}
		at = end + 1
	}
	if (name != "end" && name != "syntax") || begin != len(raw) {
		return nil, false
	}
	out[name] = nil
	return out, true
}

// parse reads what a command left. before is the state that it began with.
func parse(raw []byte, token string, before state) (dump, bool) {
	in, ok := sections(raw, token)
	if !ok {
		return dump{}, false
	}
	if _, ok := in["syntax"]; ok {
		return dump{syntax: true}, len(in) == 1
	}
	d := dump{kind: kindSh, interpreter: strings.TrimSuffix(string(in["interpreter"]), "\n")}
	s := &d.state
	s.Cwd = bytes.Clone(bytes.TrimSuffix(in["cwd"], []byte("\n")))
	s.Umask = strings.TrimSuffix(string(in["umask"]), "\n")
	if len(s.Cwd) == 0 || s.Cwd[0] != '/' || len(s.Cwd) >= maxPath || !umasks.MatchString(s.Umask) {
		return dump{}, false
	}
	if _, ok := in["shopt"]; ok {
		d.kind = kindBash
		ok = s.fromBash(in, before)
		return d, ok
	}
	return d, s.fromSh(in)
}

const maxPath = 4096

var (
	umasks    = regexp.MustCompile(`^[0-7]{1,4}$`)
	names     = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
	options   = regexp.MustCompile(`^set ([-+])o ([a-z]+(?:-[a-z]+)*)$`)
	shoptions = regexp.MustCompile(`^shopt (-[su] [a-z0-9_]+)$`)
	// A function's name may be almost anything, but is one word of which nothing is special to a shell.
	attributes = regexp.MustCompile("^declare -f([rtx]*) [^\\s;&|<>()$`'\"\\\\*?\\[#~]+$")
)

// own are the variables that belong to a shell itself: some cannot be set, others mean something else once they are.
var own = func() map[string]bool {
	m := map[string]bool{}
	for name := range strings.FieldsSeq(`BASH BASHOPTS BASHPID BASH_ALIASES BASH_ARGC BASH_ARGV BASH_ARGV0 BASH_CMDS
		BASH_COMMAND BASH_EXECUTION_STRING BASH_LINENO BASH_MONOSECONDS BASH_REMATCH BASH_SOURCE BASH_SUBSHELL
		BASH_TRAPSIG BASH_VERSINFO BASH_VERSION BASH_XTRACEFD COMP_WORDBREAKS DIRSTACK EPOCHREALTIME EPOCHSECONDS EUID
		FUNCNAME GROUPS HISTCMD LINENO PIPESTATUS PPID PWD RANDOM SECONDS SHELLOPTS SRANDOM UID _`) {
		m[name] = true
	}
	return m
}()

// preset are the variables that a shell gives itself when nobody did. A session that has unset one is not to get it
// back.
var preset = []string{
	"PATH", "IFS", "PS4", "OLDPWD", "SHLVL", "HOME", "SHELL", "HOSTNAME", "HOSTTYPE", "MACHTYPE", "OSTYPE", "OPTERR",
	"TERM",
}

func (s *state) fromBash(in map[string][]byte, before state) bool {
	list, ok := statements(in["variables"], declaration)
	if !ok {
		return false
	}
	if locals, inside := in["locals"]; inside {
		list, ok = withoutLocals(list, locals, before)
		if !ok {
			return false
		}
	}
	s.Variables = join(list)
	aliases, ok := statements(in["aliases"], aliasing)
	if !ok {
		return false
	}
	s.Aliases = join(aliases)
	var b bytes.Buffer
	b.Write(in["functions"])
	for line := range strings.Lines(string(in["attributes"])) {
		line = strings.TrimSuffix(line, "\n")
		m := attributes.FindStringSubmatch(line)
		if m != nil && m[1] != "" {
			b.WriteString(line + "\n")
		}
	}
	s.Functions = b.Bytes()
	for line := range strings.Lines(string(in["shopt"])) {
		m := shoptions.FindStringSubmatch(strings.TrimSuffix(line, "\n"))
		if m == nil {
			return false
		}
		s.Shopt = append(s.Shopt, m[1])
	}
	return s.fromOptions(in["options"])
}

// withoutLocals is the variables without those of functions that a command never returned from. Bash lists all together
// and names the innermost function's only. So these are left out, and of the rest, what there was before keeps its
// value: it may be hidden by a variable of another function.
func withoutLocals(list []statement, locals []byte, before state) ([]statement, bool) {
	inner, ok := statements(locals, localDeclaration)
	if !ok {
		return nil, false
	}
	old, _ := statements(before.Variables, declaration)
	kept := map[string]statement{}
	for _, v := range old {
		kept[v.name] = v
	}
	hidden := map[string]bool{}
	for _, v := range inner {
		hidden[v.name] = true
	}
	var out []statement
	for _, v := range list {
		if was, ok := kept[v.name]; ok {
			out = append(out, was)
		} else if !hidden[v.name] {
			out = append(out, v)
		}
	}
	return out, true
}

func (s *state) fromSh(in map[string][]byte) bool {
	list, ok := statements(in["set"], assignment)
	if !ok {
		return false
	}
	marks := make([][]byte, 0, 2)
	for _, word := range []string{"export", "readonly"} {
		marked, ok := statements(in[word], marking(word))
		if !ok {
			return false
		}
		line := []byte(word)
		for _, v := range marked {
			line = append(line, " "+v.name...)
		}
		if len(marked) > 0 {
			marks = append(marks, append(line, '\n'))
		}
	}
	s.Variables = append(join(list), bytes.Join(marks, nil)...)
	return s.fromOptions(in["options"])
}

// fromOptions keeps the options that are on. Left out is what describes how the shell was started, and what would keep
// the next one from running anything.
func (s *state) fromOptions(raw []byte) bool {
	for line := range strings.Lines(string(raw)) {
		m := options.FindStringSubmatch(strings.TrimSuffix(line, "\n"))
		switch {
		case m == nil:
			return false
		case m[1] == "+" && !slices.Contains(initiallyOn, m[2]):
		case m[2] == "noexec", m[2] == "onecmd", m[2] == "interactive", m[2] == "stdin", m[2] == "privileged",
			m[2] == "restricted":
		default:
			s.Options = append(s.Options, m[1]+"o "+m[2])
		}
	}
	return true
}

// initiallyOn are the options that a new bash has; that one of them is off is to be said too.
var initiallyOn = []string{"braceexpand", "hashall", "interactive-comments"}

// statement is one line of a list of variables or aliases, of which some have more than one line of text.
type statement struct {
	name string
	raw  []byte // with its line end
}

func join(list []statement) []byte {
	var b bytes.Buffer
	for _, s := range list {
		b.Write(s.raw)
	}
	return b.Bytes()
}

// statements reads a list. head reads what comes before the value, and gives the name and where the value begins; a
// name of own is dropped. Values are quoted text: nothing of them that a shell would perform is let through.
func statements(raw []byte, head func([]byte) (name string, value int, ok bool)) ([]statement, bool) {
	var out []statement
	for len(raw) > 0 {
		name, at, ok := head(raw)
		if !ok {
			return nil, false
		}
		n, ok := value(raw[at:])
		if !ok {
			return nil, false
		}
		if !own[name] {
			out = append(out, statement{name: name, raw: bytes.Clone(raw[:at+n])})
		}
		raw = raw[at+n:]
	}
	return out, true
}

// declaration reads "declare -FLAGS NAME" up to "=" or the line's end.
func declaration(b []byte) (string, int, bool) {
	rest, ok := bytes.CutPrefix(b, []byte("declare -"))
	if !ok {
		return "", 0, false
	}
	flags, _, ok := bytes.Cut(rest, []byte(" "))
	if !ok || len(flags) == 0 || len(flags) > 16 || bytes.ContainsFunc(flags, func(r rune) bool {
		return r != '-' && (r < 'a' || r > 'z') && r != 'A'
	}) {
		return "", 0, false
	}
	at := len("declare -") + len(flags) + 1
	return named(b, at)
}

// localDeclaration is how bash lists the variables of a function: older ones without "declare".
func localDeclaration(b []byte) (string, int, bool) {
	if bytes.HasPrefix(b, []byte("declare -")) {
		return declaration(b)
	}
	return named(b, 0)
}

func assignment(b []byte) (string, int, bool) { return named(b, 0) }

// marking reads "export NAME" and the like.
func marking(word string) func([]byte) (string, int, bool) {
	return func(b []byte) (string, int, bool) {
		if !bytes.HasPrefix(b, []byte(word+" ")) {
			return "", 0, false
		}
		return named(b, len(word)+1)
	}
}

func named(b []byte, at int) (string, int, bool) {
	n := bytes.IndexAny(b[at:], "=\n")
	if n < 0 || !names.Match(b[at:at+n]) {
		return "", 0, false
	}
	end := at + n
	if b[end] == '=' {
		end++
	}
	return string(b[at : at+n]), end, true
}

// aliasing reads "alias NAME=".
func aliasing(b []byte) (string, int, bool) {
	rest, ok := bytes.CutPrefix(b, []byte("alias "))
	if !ok {
		return "", 0, false
	}
	rest = bytes.TrimPrefix(rest, []byte("-- "))
	n := bytes.IndexByte(rest, '=')
	if n <= 0 || bytes.ContainsAny(rest[:n], " \t\n;&|<>()$`'\"\\") {
		return "", 0, false
	}
	return "alias " + string(rest[:n]), len(b) - len(rest) + n + 1, true
}

// value measures a value with its line end: words in quotes, and for arrays a list of them in parentheses.
func value(b []byte) (int, bool) {
	depth := 0
	for i := 0; i < len(b); i++ {
		switch c := b[i]; c {
		case '\n':
			if depth == 0 {
				return i + 1, true
			}
			return 0, false
		case '\'', '"':
			n, ok := quoted(b[i:], c == '"', c == '"')
			if !ok {
				return 0, false
			}
			i += n - 1
		case '$':
			if i+1 >= len(b) || b[i+1] != '\'' {
				return 0, false
			}
			n, ok := quoted(b[i+1:], true, false)
			if !ok {
				return 0, false
			}
			i += n
		case '\\':
			if i++; i >= len(b) || b[i] == '\n' {
				return 0, false
			}
		case '(':
			if depth++; i > 0 || depth > 1 {
				return 0, false
			}
		case ')':
			if depth--; depth < 0 {
				return 0, false
			}
		case ' ', '\t':
			if depth == 0 {
				return 0, false
			}
		case ';', '&', '|', '<', '>', '`', '#':
			if c != '#' || i > 0 && (b[i-1] == ' ' || b[i-1] == '(') {
				return 0, false
			}
		}
	}
	return 0, false
}

// quoted measures a quoted text from its first quote to its last. escapes: a backslash hides the next byte. expands: a
// dollar or backquote that is not hidden would be performed.
func quoted(b []byte, escapes, expands bool) (int, bool) {
	for i := 1; i < len(b); i++ {
		switch c := b[i]; {
		case c == b[0]:
			return i + 1, true
		case c == '\\' && escapes:
			i++
		case expands && (c == '`' || c == '$'):
			return 0, false
		}
	}
	return 0, false
}

//go:embed open.sh
var openScript string

//go:embed dump.bash
var dumpBash string

//go:embed dump.sh
var dumpSh string

//go:embed run.bash
var runBash string

//go:embed run.sh
var runSh string

//go:embed check.sh
var checkScript string

// The paths at which a command finds its program and leaves its state.
var (
	stateIn  = fmt.Sprintf("/proc/self/fd/%d", chronus.StateIn)
	stateOut = fmt.Sprintf("/proc/self/fd/%d", chronus.StateOut)
)

// boot is what a session's interpreter is given as its command. The script is evaluated here, at the top level, so that
// it is neither a function nor a sourced file; what is particular to it stays out of the process's arguments, where
// pkill -f would find it.
var boot = fmt.Sprintf(`. %s;eval "$1"`, stateIn)

// after goes behind boot where a script may set an EXIT trap, in place of the one that tells the state.
var after = fmt.Sprintf(`;{ . %s;} >/dev/null 2>&1`, stateIn)

// arguments are those of a command of a session.
func (s state) arguments(interpreter, name, script, token string) []string {
	text := boot
	if strings.Contains(script, "trap") || bytes.Contains(s.Functions, []byte("trap")) ||
		bytes.Contains(s.Aliases, []byte("trap")) {
		text += after
	}
	return []string{interpreter, "-c", text, name, token}
}

func fill(text, token string, more ...string) string {
	words := append([]string{"@TOKEN@", token, "@IN@", stateIn, "@OUT@", stateOut}, more...)
	return strings.NewReplacer(words...).Replace(text)
}

// opening is the program that finds out with what a session begins. name is the interpreter as it was asked for.
func opening(name, token string) []byte {
	return []byte(fill(openScript, token, "@NAME@", quote(name), "@BASH@", quote(fill(dumpBash, token)),
		"@SH@", quote(fill(dumpSh, token))))
}

// program is what a command's shell reads: the state, then the script.
func program(kind string, s state, script, token string) []byte {
	text, dumping, extglob := runSh, dumpSh, ""
	if kind == kindBash {
		text, dumping, extglob = runBash, dumpBash, `\builtin shopt -s extglob;`
	}
	noexec := `\\set -n`
	if slices.Contains(s.Options, "-o posix") {
		noexec = `\\set -o posix -n`
	}
	check := ""
	if i := strings.IndexByte(script, '\n'); i >= 0 && i < len(script)-1 {
		check = fill(checkScript, token, "@NOEXEC@", noexec, "@EXTGLOB@", extglob)
	}
	return []byte(fill(text, token, "@DUMP@", fill(dumping, token), "@STATE@", s.load(kind), "@SCRIPT@", quote(script),
		"@CHECK@", check, "@PREFIX@", quote(prefix(token)), "@LATE@", quote(s.late(kind, script))))
}

// load is the part of a state that is in force before the script is parsed.
func (s state) load(kind string) string {
	var b strings.Builder
	unset := func(have func(string) bool) {
		for _, name := range preset {
			if !have(name) {
				b.WriteString(" " + name)
			}
		}
		b.WriteString("\n")
	}
	if kind != kindBash {
		fmt.Fprintf(&b, "\\umask %s\n\\unset -v", s.Umask)
		unset(func(name string) bool { return bytes.Contains(s.Variables, []byte(name+"=")) })
		fmt.Fprintf(&b, "\\eval %s 2>/dev/null\n", quote(string(s.Variables)))
		return b.String()
	}
	fmt.Fprintf(&b, "\\builtin umask %s\n\\builtin unset -v", s.Umask)
	unset(func(name string) bool {
		return bytes.Contains(s.Variables, []byte(" "+name+"=")) || bytes.Contains(s.Variables, []byte(" "+name+"\n"))
	})
	fmt.Fprintf(&b, "\\eval %s 2>/dev/null\n", quote(string(s.Variables)))
	if len(s.Aliases) > 0 {
		fmt.Fprintf(&b, "\\eval %s 2>/dev/null\n", quote(string(s.Aliases)))
	}
	for _, way := range []string{"-u", "-s"} {
		fmt.Fprintf(&b, "\\builtin shopt %s", way)
		for _, o := range s.Shopt {
			if name, ok := strings.CutPrefix(o, way+" "); ok && name != "login_shell" && name != "restricted_shell" {
				b.WriteString(" " + name)
			}
		}
		b.WriteString(" 2>/dev/null\n")
	}
	return b.String()
}

// prefix goes before the script on its first line. As it is one line with the script's first, none of it is run if that
// cannot be parsed. It is short, since a shell that cannot parse a line quotes all of it.
func prefix(token string) string { return fmt.Sprintf(`: %s;\eval "$2";`, token) }

// late is what the prefix evaluates: the part of a state that would meddle with the wrapper, or that the wrapper is to
// be safe from.
func (s state) late(kind, script string) string {
	builtin := `\`
	if kind == kindBash {
		builtin = `\builtin `
	}
	var b strings.Builder
	b.WriteString(builtin + "shift 2\n")
	if kind == kindBash && len(s.Functions) > 0 {
		// They are told with all aliases expanded, and may hold patterns that are an option.
		b.WriteString("\\builtin shopt -u expand_aliases\n\\builtin shopt -s extglob\n")
		b.Write(s.Functions)
		if slices.Contains(s.Shopt, "-u extglob") {
			b.WriteString("\\builtin shopt -u extglob\n")
		}
		if slices.Contains(s.Shopt, "-s expand_aliases") {
			b.WriteString("\\builtin shopt -s expand_aliases\n")
		}
	}
	quiet := true
	if len(s.Options) > 0 {
		b.WriteString(builtin + "set")
		for _, o := range s.Options {
			b.WriteString(" " + o)
			quiet = quiet && o != "-o errexit" && o != "-o xtrace"
		}
		b.WriteString("\n")
	}
	if s.Status != 0 && quiet && !blank(script) {
		fmt.Fprintf(&b, "__sandsea(){ %sunset -f __sandsea;return %d;};__sandsea\n", builtin, s.Status)
	}
	return b.String()
}

// blank: there is nothing to run, so that the status is 0 and not the one before.
func blank(script string) bool {
	for line := range strings.Lines(script) {
		if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
			return false
		}
	}
	return true
}

// quote makes one word of any text.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
