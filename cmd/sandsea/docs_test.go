package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/sandsea/sandsea/internal/aether/config"
	"github.com/sandsea/sandsea/internal/sandboxpb"
)

// snippets are the blocks of code in a document, by their language, in order.
func snippets(text string) map[string][]string {
	out := map[string][]string{}
	for _, m := range regexp.MustCompile("(?ms)^```([a-z]*)\n(.*?)^```$").FindAllStringSubmatch(text, -1) {
		out[m[1]] = append(out[m[1]], m[2])
	}
	return out
}

// What docs/NETWORK.md shows can be used as it stands.
func TestSnippetsOfTheNetworksPage(t *testing.T) {
	text, err := os.ReadFile("../../docs/NETWORK.md")
	if err != nil {
		t.Fatal(err)
	}
	users, operators, ok := strings.Cut(string(text), "\n## For operators")
	if !ok {
		t.Fatal("the page has no part for operators")
	}
	for _, part := range []string{users, operators} {
		for language, list := range snippets(part) {
			if language != "toml" && language != "sh" {
				t.Errorf("what is this: %s", list[0])
			}
		}
	}
	policies := snippets(users)["toml"]
	if len(policies) < 4 {
		t.Errorf("only %d policies", len(policies))
	}
	for _, policy := range policies {
		file := filepath.Join(t.TempDir(), "policy.toml")
		if err := os.WriteFile(file, []byte(policy), 0o600); err != nil {
			t.Fatal(err)
		}
		read, err := readPolicy("network", file)
		if err != nil {
			t.Errorf("%s\n%v", policy, err)
			continue
		}
		p, err := sandboxpb.ToPolicy("network", read)
		if err == nil {
			_, err = p.Validate()
		}
		if err != nil {
			t.Errorf("%s\n%v", policy, err)
		}
	}
	settings := snippets(operators)["toml"]
	if len(settings) == 0 {
		t.Error("there is no aether.toml")
	}
	for _, text := range settings {
		dir := t.TempDir()
		for _, m := range regexp.MustCompile(`"/etc/sandsea/([a-z.]+)"`).FindAllStringSubmatch(text, -1) {
			if err := os.WriteFile(filepath.Join(dir, m[1]), []byte("Bearer x\n"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		cfg, err := config.Parse(filepath.Join(dir, config.FileName), strings.ReplaceAll(text, "/etc/sandsea/", dir+"/"))
		if err != nil {
			t.Errorf("%s\n%v", text, err)
			continue
		}
		if cfg.Limits != config.DefaultLimits {
			t.Errorf("the limits that are shown are not those of who says nothing: %+v", cfg.Limits)
		}
		if len(cfg.Grants("default")) == 0 {
			t.Error("the grant that is shown is not the project's of a new installation")
		}
		if secret := cfg.Secrets["model-key"]; !secret.For("default") || !secret.Covers("api.example") {
			t.Error("the secret that is shown does not fit the recipe")
		}
	}
	commands := 0
	for _, block := range snippets(users)["sh"] {
		for line := range strings.Lines(block) {
			commands++
			t.Run(strings.TrimSpace(line), func(t *testing.T) { runExample(t, strings.TrimSpace(line)) })
		}
	}
	if commands == 0 {
		t.Error("the page has no commands")
	}
}
