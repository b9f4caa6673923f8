package server

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
)

// File is one entry of a root file system made by Tar. The type follows from the name and the fields: a name that ends
// in a slash is a directory, one with a Link is a symbolic link.
type File struct {
	Name string
	Body string
	Link string
	// Hard is the name of another entry of the same archive that this one is a hard link to.
	Hard string
	Mode int64 // 0: 0755 for directories, else 0644
	UID  int
	GID  int
	// Device makes a character device with these numbers.
	Device *[2]int64
	Xattrs map[string]string
}

// Tar makes an archive of files.
func Tar(files []File) ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		h := &tar.Header{
			Name: f.Name, Typeflag: tar.TypeReg, Mode: f.Mode, Uid: f.UID, Gid: f.GID, Size: int64(len(f.Body)),
			Linkname: f.Link, Format: tar.FormatPAX,
		}
		switch {
		case strings.HasSuffix(f.Name, "/"):
			h.Typeflag = tar.TypeDir
		case f.Hard != "":
			h.Typeflag, h.Linkname = tar.TypeLink, f.Hard
		case f.Link != "":
			h.Typeflag = tar.TypeSymlink
		case f.Device != nil:
			h.Typeflag, h.Devmajor, h.Devminor = tar.TypeChar, f.Device[0], f.Device[1]
		}
		if f.Mode == 0 {
			h.Mode = 0o644
			if h.Typeflag == tar.TypeDir {
				h.Mode = 0o755
			}
		}
		for k, v := range f.Xattrs {
			if h.PAXRecords == nil {
				h.PAXRecords = map[string]string{}
			}
			h.PAXRecords["SCHILY.xattr."+k] = v
		}
		if err := w.WriteHeader(h); err != nil {
			return nil, fmt.Errorf("archive %s: %w", f.Name, err)
		}
		if _, err := io.WriteString(w, f.Body); err != nil {
			return nil, fmt.Errorf("archive %s: %w", f.Name, err)
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// Passwd and Group are of the busybox image: alice is in staff too, bob's home is absent.
const (
	Passwd = "root:x:0:0:root:/root:/bin/sh\nalice:x:1000:1000::/home/alice:/bin/sh\nbob:x:1001:1001::/nowhere:/bin/sh\n"
	Group  = "root:x:0:\nalice:x:1000:\nbob:x:1001:\nstaff:x:50:alice,carol\n"
)

// Busybox is the root file system of a small image: a static busybox with all its names, three users, /tmp.
func Busybox(ctx context.Context) ([]File, error) {
	path, err := exec.LookPath("busybox")
	if err != nil {
		return nil, fmt.Errorf("needs the Debian package busybox-static: %w", err)
	}
	body, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	names, err := exec.CommandContext(ctx, path, "--list").Output()
	if err != nil {
		return nil, fmt.Errorf("%s --list: %w", path, err)
	}
	files := []File{
		{Name: "bin/"},
		{Name: "dev/"},
		{Name: "etc/"},
		{Name: "etc/passwd", Body: Passwd},
		{Name: "etc/group", Body: Group},
		{Name: "home/"},
		{Name: "home/alice/", UID: 1000, GID: 1000},
		{Name: "proc/"},
		{Name: "root/", Mode: 0o700},
		{Name: "srv/"},
		{Name: "sys/"},
		{Name: "tmp/", Mode: 0o1777},
		{Name: "var/"},
		{Name: "bin/busybox", Body: string(body), Mode: 0o755},
	}
	for name := range strings.FieldsSeq(string(names)) {
		if name != "busybox" {
			files = append(files, File{Name: "bin/" + name, Link: "busybox"})
		}
	}
	return files, nil
}

// Import makes an image of a root file system.
func (s *Server) Import(ctx context.Context, name string, files []File, cfg *sandseav1.ImageConfig) (*sandseav1.Image, error) {
	b, err := Tar(files)
	if err != nil {
		return nil, err
	}
	return s.ImportArchive(ctx, name, sandseav1.ArchiveFormat_ARCHIVE_FORMAT_ROOTFS, b, cfg)
}

// ImportArchive makes an image of an archive.
func (s *Server) ImportArchive(ctx context.Context, name string, format sandseav1.ArchiveFormat, b []byte,
	cfg *sandseav1.ImageConfig,
) (*sandseav1.Image, error) {
	up, err := s.Client.UploadImage(ctx, bytes.NewReader(b))
	if err != nil {
		return nil, fmt.Errorf("upload %s: %w", name, err)
	}
	img, _, err := s.Client.ImportImage(ctx, &sandseav1.ImportImageRequest{
		Source: &sandseav1.ImportImageRequest_Archive{Archive: &sandseav1.ArchiveSource{Upload: up, Format: format}},
		Name:   name, Config: cfg,
	}, nil)
	if err != nil {
		return nil, fmt.Errorf("import %s: %w", name, err)
	}
	return img, nil
}

// ImportBusybox makes the image "busybox".
func (s *Server) ImportBusybox(ctx context.Context) error {
	files, err := Busybox(ctx)
	if err != nil {
		return err
	}
	_, err = s.Import(ctx, "busybox", files, nil)
	return err
}

// OCI makes a tar of an OCI image layout with these layers, lowest first.
func OCI(layers [][]File, cfg *sandseav1.ImageConfig) ([]byte, error) {
	type descriptor struct {
		MediaType string `json:"mediaType"`
		Digest    string `json:"digest"`
		Size      int    `json:"size"`
	}
	files := []File{{Name: "oci-layout", Body: `{"imageLayoutVersion":"1.0.0"}`}}
	put := func(mediaType string, b []byte) descriptor {
		sum := fmt.Sprintf("%x", sha256.Sum256(b))
		files = append(files, File{Name: "blobs/sha256/" + sum, Body: string(b)})
		return descriptor{mediaType, "sha256:" + sum, len(b)}
	}
	var descriptors []descriptor
	var diffs []string
	for _, l := range layers {
		b, err := Tar(l)
		if err != nil {
			return nil, err
		}
		d := put("application/vnd.oci.image.layer.v1.tar", b)
		descriptors, diffs = append(descriptors, d), append(diffs, d.Digest)
	}
	document := func(mediaType string, v any) (descriptor, error) {
		b, err := json.Marshal(v)
		return put(mediaType, b), err
	}
	config, err := document("application/vnd.oci.image.config.v1+json", map[string]any{
		"architecture": runtime.GOARCH, "os": "linux",
		"rootfs": map[string]any{"type": "layers", "diff_ids": diffs},
		"config": map[string]any{
			"User": cfg.GetUser(), "WorkingDir": cfg.GetWorkdir(), "Env": cfg.GetEnv(), "Entrypoint": cfg.GetEntrypoint(),
			"Cmd": cfg.GetCmd(),
		},
	})
	if err != nil {
		return nil, err
	}
	const manifestType = "application/vnd.oci.image.manifest.v1+json"
	manifest, err := document(manifestType, map[string]any{
		"schemaVersion": 2, "mediaType": manifestType, "config": config, "layers": descriptors,
	})
	if err != nil {
		return nil, err
	}
	index, err := json.Marshal(map[string]any{"schemaVersion": 2, "manifests": []descriptor{manifest}})
	if err != nil {
		return nil, err
	}
	return Tar(append(files, File{Name: "index.json", Body: string(index)}))
}
