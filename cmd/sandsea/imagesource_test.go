package main

import (
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/spf13/cobra"
)

func TestTheSourceOfAnImageIsTakenApart(t *testing.T) {
	dir := t.TempDir()
	odd := filepath.Join(dir, "a:b.tar")
	plain := filepath.Join(dir, "images.tar")
	for _, f := range []string{odd, plain} {
		if err := os.WriteFile(f, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for in, want := range map[string][2]string{
		plain:                        {plain, ""},
		plain + ":app:1":             {plain, "app:1"},
		odd:                          {odd, ""},
		odd + ":registry:5000/app:1": {odd, "registry:5000/app:1"},
		"-":                          {"-", ""},
		"-:app:1":                    {"-", "app:1"},
		dir + "/none:x":              {dir + "/none:x", ""},
	} {
		file, ref := splitArchive(in)
		if got := [2]string{file, ref}; got != want {
			t.Errorf("%s: %v, want %v", in, got, want)
		}
	}
}

func TestFlagsOfOtherSourcesAreRefused(t *testing.T) {
	for _, tc := range []struct {
		args []string
		ok   bool
	}{
		{[]string{"docker://python:3.11", "--insecure", "--platform", "linux/amd64"}, true},
		{[]string{"docker://python", "--username", "me", "--password-stdin"}, true},
		{[]string{"docker-archive:x.tar", "--reference", "app:1"}, true},
		{[]string{"debian:bookworm", "--include", "git"}, true},
		{[]string{"docker:python"}, false},
		{[]string{"docker://"}, false},
		{[]string{"podman://x"}, false},
		{[]string{"docker://python", "--username", "me"}, false},
		{[]string{"docker://python", "--password-stdin"}, false},
		{[]string{"docker://python", "--include", "git"}, false},
		{[]string{"debian:bookworm", "--platform", "linux/amd64"}, false},
		{[]string{"rootfs:x.tar", "--insecure"}, false},
	} {
		var f importFlags
		cmd := &cobra.Command{Use: "import"}
		f.register(cmd)
		if err := cmd.ParseFlags(tc.args[1:]); err != nil {
			t.Fatal(err)
		}
		if err := f.read(cmd, tc.args[0]); (err == nil) != tc.ok {
			t.Errorf("%q: %v", tc.args, err)
		}
	}
}

func TestWhatDockerLoginLeftIsShownToItsRegistryOnly(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("DOCKER_CONFIG", dir)
	t.Setenv("HOME", dir)
	doc := fmt.Sprintf(`{"auths":{"registry.example":{"auth":%q},"bearer.example":{"registrytoken":"t"},"id.example":{"identitytoken":"i"},`+
		`"https://`+name.DefaultRegistry+`/v1/":{"auth":%q}}}`, base64.StdEncoding.EncodeToString([]byte("me:pass")),
		base64.StdEncoding.EncodeToString([]byte("hub:word")))
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(doc), 0o600); err != nil {
		t.Fatal(err)
	}
	for in, want := range map[string][3]string{ // user, password, token
		"registry.example/team/app:1": {"me", "pass", ""}, "python:3.11": {"hub", "word", ""}, "other.example/x/y": {},
		"bearer.example/a": {"", "", "t"}, "id.example/a": {"<token>", "i", ""},
	} {
		ref, err := name.ParseReference(in)
		if err != nil {
			t.Fatal(err)
		}
		auth, err := loggedIn(t.Context(), ref)
		if got := [3]string{auth.GetUsername(), auth.GetPassword(), auth.GetToken()}; err != nil || got != want {
			t.Errorf("%s: %v %v, want %v", in, got, err, want)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	ref, err := name.ParseReference("registry.example/a")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := loggedIn(t.Context(), ref); err == nil {
		t.Error("a broken config is taken for none")
	}
}
