package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/spf13/cobra"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
)

// maxPassword bounds what is read from standard input as a password.
const maxPassword = 64 << 10

// importFlags say where an image comes from and what it is called.
type importFlags struct {
	name, reference          string
	include                  []string
	refresh                  bool
	platform, username       string
	insecure, password       bool
	user, workdir            string
	env, entrypoint, command []string

	kind, rest string // of SRC
}

const sourceKinds = "debian:SUITE, docker://REF, docker-archive:FILE, oci:DIR or rootfs:FILE.tar"

func (f *importFlags) register(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.StringVar(&f.name, "name", "", "name of the image (default: from the source)")
	fl.StringSliceVar(&f.include, "include", nil, "debian: more packages")
	fl.BoolVar(&f.refresh, "refresh", false, "debian: ask the package index again")
	fl.StringVar(&f.reference, "reference", "", "oci, docker-archive: which of several images")
	fl.StringVar(&f.platform, "platform", "", "docker: as linux/amd64 (default: the node's)")
	fl.BoolVar(&f.insecure, "insecure", false, "docker: allow plain HTTP and certificates that cannot be verified")
	fl.StringVar(&f.username, "username", "", "docker: who asks (default: as docker login left it)")
	fl.BoolVar(&f.password, "password-stdin", false, "docker: read the password from standard input")
	fl.StringVar(&f.user, "user", "", "default user")
	fl.StringVar(&f.workdir, "workdir", "", "default working directory")
	fl.StringArrayVarP(&f.env, "env", "e", nil, "environment variable, as K=V")
	fl.StringSliceVar(&f.entrypoint, "entrypoint", nil, "entrypoint")
	fl.StringSliceVar(&f.command, "cmd", nil, "command")
}

// read takes SRC apart and refuses flags that are for other kinds of source.
func (f *importFlags) read(cmd *cobra.Command, src string) error {
	var ok bool
	f.kind, f.rest, ok = strings.Cut(src, ":")
	if f.kind == "docker" {
		f.rest, ok = strings.CutPrefix(f.rest, "//")
	}
	if !ok || f.rest == "" || !slices.Contains([]string{"debian", "docker", "docker-archive", "oci", "rootfs"}, f.kind) {
		return usage(cmd, "image import %s: write %s", ui.Text(src), sourceKinds)
	}
	for flag, kinds := range map[string][]string{
		"include": {"debian"}, "refresh": {"debian"}, "reference": {"oci", "docker-archive"},
		"platform": {"docker"}, "insecure": {"docker"}, "username": {"docker"}, "password-stdin": {"docker"},
	} {
		if cmd.Flags().Changed(flag) && !slices.Contains(kinds, f.kind) {
			return usage(cmd, "image import: --%s is for %s", flag, strings.Join(kinds, " and "))
		}
	}
	if f.password != (f.username != "") {
		return usage(cmd, "image import: --username and --password-stdin go together")
	}
	return nil
}

// registry is the source docker://REF, with the credentials that docker login left here unless others are given.
func (a *app) registry(ctx context.Context, f *importFlags) (*sandseav1.RegistrySource, error) {
	ref, err := name.ParseReference(f.rest)
	if err != nil {
		return nil, misuse(errdefs.New(errdefs.Invalid, "", "docker://%s: no image name", ui.Text(f.rest)).WithField("source", "").
			WithHint("Write it as docker://python:3.11, docker://registry.example/team/image:tag or docker://NAME@sha256:DIGEST"))
	}
	out := &sandseav1.RegistrySource{Reference: f.rest, Insecure: f.insecure, Platform: f.platform}
	if f.username != "" {
		secret, err := io.ReadAll(io.LimitReader(a.input(ctx), maxPassword+1))
		if err != nil {
			return nil, fmt.Errorf("read the password: %w", err)
		}
		password := strings.TrimRight(string(secret), "\r\n")
		if password == "" || len(password) > maxPassword {
			return nil, misuse(errdefs.New(errdefs.Invalid, "", "--password-stdin: no password on standard input").
				WithField("password-stdin", "").WithHint("Pipe it in: sandsea image import … --password-stdin < FILE"))
		}
		out.Auth = &sandseav1.RegistryAuth{Username: f.username, Password: password}
		return out, nil
	}
	out.Auth, err = loggedIn(ctx, ref)
	return out, err
}

// loggedIn is what docker login left for a registry; nil if nothing.
func loggedIn(ctx context.Context, ref name.Reference) (*sandseav1.RegistryAuth, error) {
	found, err := authn.Resolve(ctx, authn.DefaultKeychain, ref.Context())
	var cfg *authn.AuthConfig
	if err == nil {
		cfg, err = authn.Authorization(ctx, found)
	}
	if err != nil {
		return nil, errdefs.New(errdefs.FailedPrecondition, "", "the credentials that docker login left cannot be read: %s",
			ui.Text(err.Error())).WithField("username", "").
			WithHint("Correct ~/.docker/config.json, or give --username NAME --password-stdin").Wrap(err)
	}
	switch {
	case cfg.RegistryToken != "":
		return &sandseav1.RegistryAuth{Token: cfg.RegistryToken}, nil
	case cfg.IdentityToken != "":
		// As Docker's credential helpers write it.
		return &sandseav1.RegistryAuth{Username: "<token>", Password: cfg.IdentityToken}, nil
	case cfg.Username != "":
		return &sandseav1.RegistryAuth{Username: cfg.Username, Password: cfg.Password}, nil
	}
	return nil, nil
}

// splitArchive takes FILE[:REF] apart: the shortest beginning that is a file names it, since both may hold colons.
func splitArchive(s string) (file, reference string) {
	for at := range s {
		if s[at] != ':' {
			continue
		}
		if s[:at] == "-" {
			return "-", s[at+1:]
		}
		if st, err := os.Stat(s[:at]); err == nil && st.Mode().IsRegular() {
			return s[:at], s[at+1:]
		}
	}
	return s, ""
}
