package shells

import (
	"bytes"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// told is what a shell tells, with these sections in place of the usual ones.
func told(sections ...string) string {
	names := []string{"cwd", "umask", "variables", "functions", "attributes", "aliases", "shopt", "options"}
	texts := map[string]string{
		"cwd": "/w\n", "umask": "0022\n", "variables": "declare -- a=\"1\"\n", "shopt": "shopt -s extglob\n", "options": "set -o posix\n",
	}
	for i := 0; i < len(sections); i += 2 {
		texts[sections[i]] = sections[i+1]
	}
	var b strings.Builder
	for _, n := range names {
		b.WriteString(testToken + " " + n + "\n" + texts[n])
	}
	if _, inside := texts["locals"]; inside {
		b.WriteString(testToken + " locals\n" + texts["locals"])
	}
	return b.String() + testToken + " end\n"
}

func TestWhatAShellTellsIsChecked(t *testing.T) {
	t.Parallel()
	full := told()
	for name, c := range map[string]struct {
		raw string
		ok  bool
	}{
		"as it is":                       {full, true},
		"zeros behind it":                {full + strings.Repeat("\x00", 100), true},
		"nothing":                        {"", false},
		"only zeros":                     {strings.Repeat("\x00", 100), false},
		"the end is missing":             {strings.TrimSuffix(full, testToken+" end\n"), false},
		"the last line has no end":       {strings.TrimSuffix(full, "\n"), false},
		"something behind the end":       {full + "x\n", false},
		"something before the beginning": {"x\n" + full, false},
		"another word":                   {strings.ReplaceAll(full, testToken, "fedcba9876543210"), false},
		"a section twice":                {strings.TrimSuffix(full, testToken+" end\n") + testToken + " cwd\n/x\n" + testToken + " end\n", false},
		"a relative directory":           {told("cwd", "w\n"), false},
		"no directory":                   {told("cwd", "\n"), false},
		"a long directory":               {told("cwd", "/"+strings.Repeat("x", 4096)+"\n"), false},
		"a directory with a line end":    {told("cwd", "/a\nb\n"), true},
		"a umask that is none":           {told("umask", "22; id\n"), false},
		"an option that is none":         {told("options", "set -o x; id\n"), false},
		"a shopt that is none":           {told("shopt", "shopt -s x; id\n"), false},
		"an array":                       {told("variables", "declare -a a=([0]=\"b c\" [1]=$'d\\ne' [2]='f')\n"), true},
		"an old array":                   {told("variables", "declare -a a='([0]=\"b\")'\n"), true},
		"a variable without a value":     {told("variables", "declare -x A\n"), true},
		"a value of several lines":       {told("variables", "declare -- a=\"b\nc\"\n"), true},
		"two quoted parts":               {told("variables", "declare -- a='b'\\''c'\n"), true},
		"a command in place of one":      {told("variables", "id\n"), false},
		"a command behind one":           {told("variables", "declare -- a=\"1\"; id\n"), false},
		"a command instead of a value":   {told("variables", "declare -- a=$(id)\n"), false},
		"a command inside a value":       {told("variables", "declare -- a=\"$(id)\"\n"), false},
		"the old way":                    {told("variables", "declare -- a=`id`\n"), false},
		"the old way inside":             {told("variables", "declare -- a=\"`id`\"\n"), false},
		"a redirection":                  {told("variables", "declare -- a=1 >/x\n"), false},
		"a pipe":                         {told("variables", "declare -- a=1|id\n"), false},
		"another builtin":                {told("variables", "declare -- a\nexport b\n"), false},
		"a name that is none":            {told("variables", "declare -- a-b=\"1\"\n"), false},
		"an open quote":                  {told("variables", "declare -- a=\"1\n"), false},
		"an open list":                   {told("variables", "declare -a a=(\"1\"\n"), false},
		"a list in a list":               {told("variables", "declare -a a=((1))\n"), false},
		"a comment":                      {told("variables", "declare -a a=(1 #\n"), false},
		"flags that are none":            {told("variables", "declare -f=id a\n"), false},
		"an alias":                       {told("aliases", "alias a='b c'\nalias -- -x='y'\n"), true},
		"a command as alias":             {told("aliases", "alias a='b'; id\n"), false},
		"an alias of a command":          {told("aliases", "alias $(id)='b'\n"), false},
		"a function of any text":         {told("functions", "f () \n{ \n    id\n}\n"), true},
		"what can only be said together": {testToken + " syntax\n", true},
		"a wrong script and more":        {testToken + " syntax\n" + full, false},
	} {
		if _, ok := parse([]byte(c.raw), testToken, state{}); ok != c.ok {
			t.Errorf("%s: got %v, want %v", name, ok, c.ok)
		}
	}
}

func TestWhatIsKeptOfIt(t *testing.T) {
	t.Parallel()
	raw := told(
		"variables", "declare -- IFS=$' \\t\\n'\ndeclare -ir BASHPID=\"1\"\ndeclare -- _=\"x\"\ndeclare -x PWD=\"/w\"\ndeclare -r b=\"2\"\n",
		"functions", "f () \n{ \n    :\n}\n", "attributes", "declare -f f\ndeclare -fx g\ndeclare -fx a;id\n",
		"shopt", "shopt -s extglob\nshopt -u nullglob\n", "options", "set -o errexit\nset +o nounset\nset -o noexec\nset +o braceexpand\n",
	)
	d, ok := parse([]byte(raw), testToken, state{})
	if !ok {
		t.Fatal("refused")
	}
	want := state{
		Cwd: []byte("/w"), Umask: "0022", Variables: []byte("declare -- IFS=$' \\t\\n'\ndeclare -r b=\"2\"\n"),
		Functions: []byte("f () \n{ \n    :\n}\ndeclare -fx g\n"), Shopt: []string{"-s extglob", "-u nullglob"},
		Options: []string{"-o errexit", "+o braceexpand"},
	}
	if diff := cmp.Diff(want, d.state, cmp.Comparer(bytes.Equal)); diff != "" || d.kind != kindBash {
		t.Errorf("%s %s", d.kind, diff)
	}
}

func TestLocalsAreLeftOut(t *testing.T) {
	t.Parallel()
	before := state{Variables: []byte("declare -- a=\"old\"\ndeclare -- b=\"old\"\n")}
	raw := told("variables", "declare -- a=\"inner\"\ndeclare -- l=\"inner\"\ndeclare -- n=\"new\"\n", "locals", "declare -- l=\"inner\"\n")
	d, ok := parse([]byte(raw), testToken, before)
	if got, want := string(d.state.Variables), "declare -- a=\"old\"\ndeclare -- n=\"new\"\n"; !ok || got != want {
		t.Errorf("got %v %q, want %q", ok, got, want)
	}
}

// Whatever comes back: what is let through is taken in the same way again, and makes a program whose parts a shell can
// tell apart.
func FuzzParse(f *testing.F) {
	f.Add([]byte(told()))
	f.Add([]byte(told("variables", "declare -a a=([0]=\"b\" [1]=$'c\\n')\n", "aliases", "alias a='b'\n")))
	f.Add([]byte(testToken + " cwd\n/\n" + testToken + " umask\n022\n" + testToken + " set\na='b'\n" + testToken + " export\nexport a='b'\n" +
		testToken + " readonly\n" + testToken + " options\nset -o vi\n" + testToken + " end\n"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		d, ok := parse(raw, testToken, state{})
		if !ok || d.syntax {
			return
		}
		s := d.state
		if bytes.IndexByte(append(append(bytes.Clone(s.Variables), s.Functions...), s.Aliases...), 0) >= 0 {
			t.Fatalf("a zero byte: %q", raw)
		}
		if d.kind == kindBash {
			list, ok := statements(s.Variables, declaration)
			if !ok || !bytes.Equal(join(list), s.Variables) {
				t.Fatalf("not taken again: %q", s.Variables)
			}
		}
		_ = program(d.kind, s, "true", testToken)
	})
}

// A value that was let through performs nothing.
func FuzzValuesDoNothing(f *testing.F) {
	shell, err := exec.LookPath("bash")
	if err != nil {
		f.Skip(err)
	}
	f.Add([]byte(`"a\$(b)"`))
	f.Add([]byte(`([0]="a" [1]=$'b\'')`))
	f.Add([]byte(`'a'\''b'`))
	f.Fuzz(func(t *testing.T, text []byte) {
		raw := append(append([]byte("declare -- a="), text...), '\n')
		if n, ok := value(raw[len("declare -- a="):]); !ok || n != len(text)+1 || bytes.IndexByte(text, 0) >= 0 {
			return
		}
		cmd := exec.CommandContext(t.Context(), shell, "--norc", "-c", `exec 2>/dev/null; PATH=; command_not_found_handle() { echo ran >&3; }; exec 3>&1 >/dev/null; eval "$1"`, "-", string(raw))
		if out, _ := cmd.Output(); len(out) > 0 {
			t.Errorf("%q: it ran something", raw)
		}
	})
}
