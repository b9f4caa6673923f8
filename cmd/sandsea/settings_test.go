package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/sandsea/sandsea/internal/testkit/testserver"
)

func TestSettingsHaveAnOrder(t *testing.T) {
	dir := t.TempDir()
	user, system := filepath.Join(dir, "config.toml"), filepath.Join(dir, "sandsea.toml")
	for file, text := range map[string]string{
		user:   "project = \"mine\"\nurl = \"http://user:1\"\n",
		system: "data = \"/srv\"\nproject = \"everybodys\"\ntoken_file = \"/etc/token\"\nurl = \"http://system:1\"\n",
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	env := map[string]string{"SANDSEA_URL": "http://env:1"}
	got, err := clientSettings(func(n string) string { return env[n] }, user, system, filepath.Join(dir, "none"))
	if err != nil {
		t.Fatal(err)
	}
	want := []configValue{
		{"url", "http://env:1", "SANDSEA_URL"}, {"token_file", "/etc/token", system}, {"project", "mine", user}, {"timeout", "2m0s", "default"},
	}
	for i, w := range want {
		if got[i] != w {
			t.Errorf("got %v, want %v", got[i], w)
		}
	}
	if err := os.WriteFile(user, []byte("\nprojekt = 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := clientSettings(func(string) string { return "" }, user); err == nil ||
		err.Error() != user+":2: unknown key projekt. Did you mean project?" {
		t.Errorf("got %v", err)
	}
}

func TestTheUsersFileNamesTheServer(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	home := t.TempDir()
	dir := filepath.Join(home, ".config", "sandsea")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	token := filepath.Join(home, "token")
	for file, text := range map[string]string{
		token: s.Token, filepath.Join(dir, "config.toml"): "url = \"" + s.URL + "\"\ntoken_file = \"" + token + "\"\n",
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if r := (program{args: []string{"whoami"}, env: []string{"HOME=" + home}}).run(t); r.code != 0 || !strings.HasPrefix(r.stdout, "user:admin, ") {
		t.Error(r)
	}
	r := program{args: []string{"config"}, env: []string{"HOME=" + home}}.run(t)
	if !regexp.MustCompile(`(?m)^url +` + s.URL + ` +` + dir + `/config\.toml$`).MatchString(r.stdout) {
		t.Error(r)
	}
}

func TestDebugTellsOfCallsAndNoSecrets(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	r := program{args: []string{"ls"}, env: append(against(s), "SANDSEA_DEBUG=1")}.run(t)
	if !regexp.MustCompile(`(?m)^sandsea: debug: sandsea\.v1\.SandboxService/List 200 r-\S+ \d+(\.\d)? ms$`).MatchString(r.stderr) {
		t.Error(r)
	}
	if strings.Contains(r.stderr, s.Token) {
		t.Error("the token is told")
	}
}

func TestACallHasALimit(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	testserverHolds(s, "create")
	for timeout, want := range map[string]string{
		"500ms": `^sandsea: create: no answer in 500 ms, it may exist\. Ask again with the same key: --key k-1\n$`,
		"soon":  `^sandsea: timeout soon: is no time span; write it as 30s or 2m\. See where it is set: sandsea config\n$`,
	} {
		r := program{args: []string{"create", "--image", "py", "--key", "k-1"}, env: append(against(s), "SANDSEA_TIMEOUT="+timeout)}.run(t)
		if r.code == 0 || !regexp.MustCompile(want).MatchString(r.stderr) {
			t.Errorf("%s: %+v", timeout, r)
		}
	}
}

func TestTheFirstStepsLeadToThisServer(t *testing.T) {
	const token = "/var/lib/sandsea/admin.token"
	for _, c := range []struct{ url, token, want string }{
		{"http://127.0.0.1:7070", token, ""},
		{"http://127.0.0.1:7399", token, "  export SANDSEA_URL=http://127.0.0.1:7399\n"},
		{"http://127.0.0.1:7070", "/srv/it's/admin.token", "  export SANDSEA_TOKEN_FILE='/srv/it'\\''s/admin.token'\n"},
		{"http://127.0.0.1:7399", "/srv/a", "  export SANDSEA_URL=http://127.0.0.1:7399 SANDSEA_TOKEN_FILE='/srv/a'\n"},
	} {
		if got := clientOf(c.url, c.token); got != c.want {
			t.Errorf("%s, %s: %q, want %q", c.url, c.token, got, c.want)
		}
	}
}
