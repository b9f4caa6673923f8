// Package guest says how a sandbox's package clients find Aether: environment variables for the clients that have them,
// and configuration files for those that do not or whose environment was wiped (sudo, cron).
//
// It is tables and no more. The files are the same for every sandbox, so one layer serves a node; it lies lowest in
// the overlay, and a file of the image's own at the same path is what the sandbox sees. They do no harm where a service
// is rejected: its client then gets the mirror's refusal, with the rule's name, instead of a name that does not resolve.
//
// What has no switch for this is reached by its hosts' names instead (mirror.Service.Match): apt over http, and
// clients that insist on a host over TLS where the policy inspects it. Java has no variable that names certificate
// authorities in PEM; its package clients need none, as the mirrors speak plain HTTP to sandboxes.
package guest

import (
	"maps"
	"slices"

	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/policy"
)

// CAFile is where a sandbox whose TLS is inspected finds the certificates of the authorities that it may believe: its
// own one of Aether's. Whoever prepares the sandbox writes it; it is not among Files.
const CAFile = "/etc/sandsea/ca.pem"

// MavenSettings is the place of settings that hold for every user of a sandbox, for Maven 3.9 and later, which read
// MAVEN_ARGS. Older ones find the same text in the home of root alone.
const MavenSettings = "/etc/sandsea/maven/settings.xml"

// Mount is the URL of a service as sandboxes reach it, without a slash at the end.
func Mount(service string) string {
	return "http://" + wire.Gateway.String() + "/" + service
}

// Env is the environment of the commands of a sandbox that may use the package services, below the image's own and the
// caller's. inspect adds the variables by which clients believe CAFile.
func Env(services []string, inspect bool) map[string]string {
	env := map[string]string{}
	for _, service := range services {
		maps.Copy(env, serviceEnv(service))
	}
	if inspect {
		for _, name := range caVariables {
			env[name] = CAFile
		}
	}
	return env
}

// caVariables name a file of certificates, which replaces a client's own list (NODE_EXTRA_CA_CERTS and DENO_CERT add
// to it). uv reads SSL_CERT_FILE, as do Go, Ruby, Perl, httpx and whatever asks OpenSSL.
var caVariables = [...]string{
	"SSL_CERT_FILE",
	"REQUESTS_CA_BUNDLE",
	"CURL_CA_BUNDLE",
	"NODE_EXTRA_CA_CERTS",
	"DENO_CERT",
	"GIT_SSL_CAINFO",
	"PIP_CERT",
	"CARGO_HTTP_CAINFO",
	"BUNDLE_SSL_CA_CERT",
	"AWS_CA_BUNDLE",
	"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
	"HTTPLIB2_CA_CERTS",
}

func serviceEnv(service string) map[string]string {
	mount, host := Mount(service), wire.Gateway.String()
	switch service {
	case policy.PyPI:
		index := mount + "/simple/"
		return map[string]string{
			"PIP_INDEX_URL":      index,
			"PIP_TRUSTED_HOST":   host,
			"UV_DEFAULT_INDEX":   index,
			"UV_INDEX_URL":       index, // before uv 0.4.23
			"PDM_PYPI_URL":       index,
			"PIPENV_PYPI_MIRROR": index,
		}
	case policy.NPM:
		registry := mount + "/"
		return map[string]string{
			"npm_config_registry":        registry, // npm, pnpm, Yarn 1
			"NPM_CONFIG_REGISTRY":        registry, // Deno, Bun
			"pnpm_config_registry":       registry, // pnpm 11
			"COREPACK_NPM_REGISTRY":      mount,
			"YARN_NPM_REGISTRY_SERVER":   mount,
			"YARN_UNSAFE_HTTP_WHITELIST": host,
		}
	case policy.Golang:
		// GOSUMDB stays: its database is asked through GOPROXY. Toolchains (GOTOOLCHAIN) are modules like others.
		return map[string]string{"GOPROXY": mount}
	case policy.Maven:
		return map[string]string{"MAVEN_ARGS": "-gs " + MavenSettings}
	case policy.RubyGems:
		return map[string]string{"BUNDLE_MIRROR__ALL": mount + "/"}
	}
	return nil // Cargo has no variable for this (see Files); apt needs none
}

// File is one of the layer's.
type File struct {
	Path string // absolute
	Mode uint32 // permission bits; the owner is root
	Body string
}

// Files are the layer's, ordered by path. Directories above them are root's, mode 0755.
func Files() []File {
	pip := "[global]\nindex-url = " + Mount(policy.PyPI) + "/simple/\ntrusted-host = " + wire.Gateway.String() + "\n"
	uv := "[[index]]\nurl = \"" + Mount(policy.PyPI) + "/simple/\"\ndefault = true\n"
	npm := "registry=" + Mount(policy.NPM) + "/\n"
	golang := "GOPROXY=" + Mount(policy.Golang) + "\n"
	cargo := "[source.crates-io]\nreplace-with = \"sandsea\"\n\n[registries.sandsea]\nindex = \"sparse+" +
		Mount(policy.Crates) + "/index/\"\n"
	gem := "---\n:sources:\n- " + Mount(policy.RubyGems) + "/\n"
	// Aether refuses a Release file that has expired at the date which holds for the sandbox; apt would compare an older
	// world's with today.
	apt := "Acquire::Check-Valid-Until \"false\";\n"

	bodies := map[string]string{
		"/.cargo/config.toml":           cargo, // Cargo reads this file of every parent of where it is
		"/etc/apt/apt.conf.d/00sandsea": apt,   // first: an image's own settings overrule it
		"/etc/gemrc":                    gem,
		"/etc/npmrc":                    npm, // Debian's npm
		"/etc/pip.conf":                 pip,
		"/etc/uv/uv.toml":               uv,
		"/root/.config/go/env":          golang,
		"/root/.m2/settings.xml":        mavenSettings(),
		"/usr/etc/npmrc":                npm, // npm below /usr
		"/usr/local/etc/gemrc":          gem, // Ruby below /usr/local
		"/usr/local/etc/npmrc":          npm,
		MavenSettings:                   mavenSettings(),
	}
	var files []File
	for _, path := range slices.Sorted(maps.Keys(bodies)) {
		files = append(files, File{Path: path, Mode: 0o644, Body: bodies[path]})
	}
	return files
}

// mavenSettings takes every repository that a build names from the mirror. It stands before Maven's own mirror that
// blocks repositories over plain HTTP: of several mirrors for a repository the first counts, and the mirror itself is
// not judged again.
func mavenSettings() string {
	return `<?xml version="1.0" encoding="UTF-8"?>
<settings>
  <mirrors>
    <mirror>
      <id>sandsea</id>
      <mirrorOf>*</mirrorOf>
      <url>` + Mount(policy.Maven) + `</url>
    </mirror>
  </mirrors>
</settings>
`
}
