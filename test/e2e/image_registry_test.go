package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/require"
	"github.com/sandsea/sandsea/internal/testkit/server"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

const (
	registryUser     = "me"
	registryPassword = "s3cret"
	// of registryPassword, by bcrypt
	registryHash = "$2b$05$abcdefghijklmnopqrstuuLK7U1u6pVRmL7L1BBM2aS35PSZnDXlK"
)

// registryProgram finds what tools/setup.sh has taken out of Debian's package, or what is installed.
func registryProgram() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	program := filepath.Join(cache, "sandsea", "test", "docker-registry")
	if _, err := os.Stat(program); err == nil {
		return program, nil
	}
	return exec.LookPath("docker-registry")
}

// registry runs the registry of Debian's package docker-registry on a loopback port, for one test.
func registry(t testing.TB, locked bool) (host string) {
	t.Helper()
	program, err := registryProgram()
	require.That(t, "docker-registry", err)
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	host = l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	config := fmt.Sprintf("version: 0.1\nlog: {level: error}\nhttp: {addr: %q}\nstorage: {filesystem: {rootdirectory: %q}}\n",
		host, filepath.Join(dir, "data"))
	if locked {
		file := filepath.Join(dir, "htpasswd")
		if err := os.WriteFile(file, []byte(registryUser+":"+registryHash+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		config += fmt.Sprintf("auth: {htpasswd: {realm: test, path: %q}}\n", file)
	}
	file := filepath.Join(dir, "config.yml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "serve", file)
	var said strings.Builder
	cmd.Stderr, cmd.Stdout = &said, &said
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("the registry: %s", said.String())
		}
	})
	wait.Until(t, 20*time.Second, func() bool {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+host+"/v2/", nil)
		if err != nil {
			return false
		}
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			return false
		}
		_ = res.Body.Close()
		return true
	}, "the registry answers")
	return host
}

func push(t testing.TB, ref string, img v1.Image, auth authn.Authenticator) string {
	t.Helper()
	r, err := name.ParseReference(ref)
	if err == nil {
		err = remote.Write(r, img, remote.WithAuth(auth), remote.WithContext(within(t, 60*time.Second)))
	}
	if err != nil {
		t.Fatal(err)
	}
	return ref
}

func pull(ctx context.Context, c *client.Client, source *sandseav1.RegistrySource) (*sandseav1.Image, bool, error) {
	return c.ImportImage(ctx, &sandseav1.ImportImageRequest{Source: &sandseav1.ImportImageRequest_Registry{Registry: source}}, nil)
}

func TestAnImageOfARealRegistryRuns(t *testing.T) {
	t.Parallel()
	s := serve(t)
	host := registry(t, false)
	base := imageOf(t, v1.Config{User: "alice", Cmd: []string{"sh", "-c", "cat /app; sleep 1000"}}, busybox(t))
	top := imageOf(t, v1.Config{User: "alice", Cmd: []string{"sh", "-c", "cat /app; sleep 1000"}}, busybox(t),
		[]server.File{{Name: "app", Body: "the app\n"}})
	push(t, host+"/team/base:1", base, authn.Anonymous)
	push(t, host+"/team/app:1", top, authn.Anonymous)
	first, existed, err := pull(within(t, 2*time.Minute), s.Client, &sandseav1.RegistrySource{Reference: host + "/team/base:1"})
	if err != nil || existed || first.GetName() != host+"/team/base:1" {
		t.Fatalf("%v %t %v", first, existed, err)
	}
	// A hundred at once, of which each layer is fetched once at most: all get the same image.
	var mu sync.Mutex
	var wg sync.WaitGroup
	digests := map[string]bool{}
	ctx := within(t, 2*time.Minute)
	for range 100 {
		wg.Go(func() {
			img, _, err := pull(ctx, s.Client, &sandseav1.RegistrySource{Reference: host + "/team/app:1"})
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			digests[img.GetDigest()] = true
		})
	}
	wg.Wait()
	if len(digests) != 1 {
		t.Errorf("digests %v", digests)
	}
	sb := open(t, of(&sandseav1.Environment{Image: host + "/team/app:1"}), entrypoint(modeImage))
	awaitOutput(t, sb, 1, "the app\n")
	if got := sh(t, sb, "id -un"); got != "alice\n" {
		t.Errorf("user %q", got)
	}
	img, existed, err := pull(within(t, time.Minute), s.Client, &sandseav1.RegistrySource{Reference: host + "/team/app:1"})
	if err != nil || !existed || img.GetLayers()[0].GetDigest() != first.GetLayers()[0].GetDigest() {
		t.Errorf("again: %v %t %v", img, existed, err)
	}
	// A tag that moves.
	push(t, host+"/team/app:1", base, authn.Anonymous)
	moved, existed, err := pull(within(t, time.Minute), s.Client, &sandseav1.RegistrySource{Reference: host + "/team/app:1"})
	if err != nil || existed || moved.GetDigest() != first.GetDigest() {
		t.Errorf("after the tag moved: %v %t %v", moved, existed, err)
	}
	_, _, err = pull(within(t, time.Minute), s.Client, &sandseav1.RegistrySource{Reference: host + "/team/app:none"})
	if !errors.Is(err, errdefs.NotFound) || !strings.Contains(err.Error(), "no such tag") {
		t.Errorf("a tag that is not there: %v", err)
	}
}

func TestCredentialsOfARegistryAreUsedOnceAndKeptNowhere(t *testing.T) {
	t.Parallel()
	s := serve(t)
	host := registry(t, true)
	ref := push(t, host+"/secret/app:1", imageOf(t, v1.Config{}, busybox(t), []server.File{{Name: "secret", Body: "x"}}),
		&authn.Basic{Username: registryUser, Password: registryPassword})
	for _, auth := range []*sandseav1.RegistryAuth{nil, {Username: registryUser, Password: "wrong-s3cret"}} {
		_, _, err := pull(within(t, time.Minute), s.Client, &sandseav1.RegistrySource{Reference: ref, Auth: auth})
		if !errors.Is(err, errdefs.Denied) || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%v: %v", auth, err)
		}
	}
	run := func(config, stdin string, args ...string) (string, error) {
		cmd := exec.CommandContext(within(t, 2*time.Minute), s.Binary, args...)
		cmd.Stdin = strings.NewReader(stdin)
		cmd.Env = append(slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, "SANDSEA_") }),
			"SANDSEA_URL=http://"+s.Addr(), "SANDSEA_TOKEN_FILE="+filepath.Join(s.Dir, "admin.token"), "DOCKER_CONFIG="+config)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	out, err := run(t.TempDir(), registryPassword+"\n", "image", "import", "docker://"+ref, "--name", "given",
		"--username", registryUser, "--password-stdin")
	if err != nil {
		t.Errorf("given: %v\n%s", err, out)
	}
	login := t.TempDir() // as docker login leaves it
	doc := fmt.Sprintf(`{"auths":{%q:{"auth":"bWU6czNjcmV0"}}}`, host)
	if err := os.WriteFile(filepath.Join(login, "config.json"), []byte(doc), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := run(login, "", "image", "import", "docker://"+ref); err != nil {
		t.Errorf("left by docker login: %v\n%s", err, out)
	}
	if out, err := run(t.TempDir(), "", "image", "import", "docker://"+ref); err == nil || !strings.Contains(out, "--password-stdin") {
		t.Errorf("without any: %v\n%s", err, out)
	}
	if out, err := run(t.TempDir(), "", "image", "inspect", "given"); err != nil || !strings.Contains(out, ref) {
		t.Errorf("inspect: %v\n%s", err, out)
	}
	if strings.Contains(s.Log(), "s3cret") {
		t.Error("the log holds a password")
	}
	err = filepath.WalkDir(s.Dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() || strings.Contains(path, "/blobs/") || strings.Contains(path, "/disk") {
			return nil //nolint:nilerr // the server goes on meanwhile
		}
		if st, err := e.Info(); err != nil || st.Size() > 64<<20 {
			return nil //nolint:nilerr // likewise
		}
		if b, err := os.ReadFile(path); err == nil && strings.Contains(string(b), "s3cret") {
			t.Errorf("%s holds a password", path)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
