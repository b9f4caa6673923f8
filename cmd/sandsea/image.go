package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
	"github.com/sandsea/sandsea/internal/span"
)

// images lists the images that the server knows.
func (a *app) images(ctx context.Context) ([]*sandseav1.Image, error) {
	c, err := a.client()
	if err != nil {
		return nil, err
	}
	res, err := c.Images.List(ctx, connect.NewRequest(&sandseav1.ListImagesRequest{}))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetImages(), nil
}

func (a *app) imageCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "image", Short: "Import, list and remove images",
		Example: "  sandsea image import debian:bookworm --include python3,git\n  sandsea image ls",
	}
	cmd.AddCommand(a.imageImportCommand(), a.imageLsCommand(), a.imageInspectCommand(), a.imageRmCommand(), a.imageComposeCommand())
	return cmd
}

func (a *app) imageImportCommand() *cobra.Command {
	var f importFlags
	cmd := &cobra.Command{
		Use:   "import SRC",
		Short: "Make an image from Debian packages, a registry or an archive",
		Long: `SRC is one of
  debian:SUITE              Debian packages, no registry needed; more by --include
  docker://REF              an image of a registry, named as for docker pull
  docker-archive:FILE[:REF] what docker save wrote; - is standard input
  oci:DIR                   an OCI image layout
  rootfs:FILE.tar           a root file system, plain or compressed; - is standard input

Registries are asked by the node. It is shown what docker login has left here, unless
--username says otherwise; credentials are used once and kept nowhere.`,
		Example: `  sandsea image import debian:bookworm --include python3,git
  sandsea image import docker://python:3.11
  sandsea image import docker://registry:5000/team/app@sha256:4f1c… --name app --insecure
  sandsea image import docker://registry.example/team/app:1 --username me --password-stdin < token
  docker save app:1 | sandsea image import docker-archive:-
  sandsea image import docker-archive:images.tar:app:1
  sandsea image import rootfs:task-17.tar --name task-17
  sandsea image import oci:build/image --name app`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.read(cmd, args[0]); err != nil {
				return err
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			a.undone = "no image was made"
			p := a.io.NewProgress()
			defer p.Clear()
			began := time.Now()
			req, err := a.importRequest(cmd.Context(), c, &f, p)
			if err != nil {
				return err
			}
			img, existed, err := c.ImportImage(cmd.Context(), req, func(ip *sandseav1.ImportProgress) {
				p.Update(ip.GetStage(), ip.GetDone(), ip.GetTotal(), ip.GetUnit(), ip.GetDetail(), ip.GetFinished())
				if f.kind == "debian" {
					a.undone = keptOf(ip, a.undone)
				}
			})
			p.Clear()
			if err != nil {
				return ofArchive(err, args[0])
			}
			return a.imported(img, existed, f.kind == "debian", time.Since(began))
		},
	}
	f.register(cmd)
	return cmd
}

// keptOf is what an import from packages leaves when it is interrupted, as far as its progress tells; before until then.
// The node keeps what it has fetched. How much that is in the middle of a download nobody knows for sure.
func keptOf(ip *sandseav1.ImportProgress, before string) string {
	if ip.GetStage() != "download" || !ip.GetFinished() || ip.GetDone() <= 0 || ip.GetDone() < ip.GetTotal() {
		return before
	}
	return fmt.Sprintf("no image was made; %s of packages kept in the cache", ui.LongSize(ip.GetDone()))
}

// importRequest makes the request, and hands a local archive over first.
func (a *app) importRequest(ctx context.Context, c *client.Client, f *importFlags, p *ui.Progress) (*sandseav1.ImportImageRequest, error) {
	req := &sandseav1.ImportImageRequest{Name: f.name, Config: &sandseav1.ImageConfig{
		User: f.user, Workdir: f.workdir, Env: f.env, Entrypoint: f.entrypoint, Cmd: f.command,
	}}
	switch f.kind {
	case "debian":
		req.Source = &sandseav1.ImportImageRequest_Debian{Debian: &sandseav1.DebianSource{
			Suite: f.rest, Include: f.include, Refresh: f.refresh,
		}}
	case "docker":
		source, err := a.registry(ctx, f)
		if err != nil {
			return nil, err
		}
		req.Source = &sandseav1.ImportImageRequest_Registry{Registry: source}
	default:
		file, reference := f.rest, f.reference
		if f.kind == "docker-archive" {
			var ref string
			if file, ref = splitArchive(f.rest); ref != "" {
				reference = ref
			}
		} else {
			req.Name = cmp.Or(f.name, archiveName(f.rest))
		}
		archive, err := a.upload(ctx, c, f.kind, file, p)
		if err != nil {
			return nil, err
		}
		archive.Reference = reference
		req.Source = &sandseav1.ImportImageRequest_Archive{Archive: archive}
	}
	return req, nil
}

// archiveName is the name of an image from an archive that nobody named; standard input gives none.
func archiveName(source string) string {
	if source == "-" {
		return ""
	}
	name, _, _ := strings.Cut(filepath.Base(source), ".tar")
	return name
}

// imported prints the digest on standard output and the rest beside it.
func (a *app) imported(img *sandseav1.Image, existed, refreshable bool, took time.Duration) error {
	if a.json {
		return printJSON(a.io.Out, append(document("sandsea.image/1", img), member{"existed", existed}))
	}
	switch {
	case existed && refreshable:
		a.io.Note("%s: already here, same packages (--refresh asks again)", ui.Text(img.GetName()))
	case existed:
		a.io.Note("%s: already here, same content", ui.Text(img.GetName()))
	default:
		a.io.Note("%s  %s, %s", ui.Text(img.GetName()), ui.LongSize(imageBytes(img)), ui.Took(took))
		try := "CMD" // what is in the images of others is not known
		if refreshable {
			try = "ls /"
		}
		a.io.Note("Try it: sandsea run --image %s -- %s", ui.Text(img.GetName()), try)
	}
	fmt.Fprintln(a.io.Out, img.GetDigest())
	return nil
}

func imageBytes(img *sandseav1.Image) int64 {
	var n int64
	for _, l := range img.GetLayers() {
		n += l.GetBytes()
	}
	return n
}

// upload hands a local archive, or an OCI layout packed on the way, to the server.
func (a *app) upload(ctx context.Context, c *client.Client, kind, source string, p *ui.Progress) (*sandseav1.ArchiveSource, error) {
	out := &sandseav1.ArchiveSource{Format: sandseav1.ArchiveFormat_ARCHIVE_FORMAT_ROOTFS}
	if kind == "docker-archive" {
		out.Format = sandseav1.ArchiveFormat_ARCHIVE_FORMAT_DOCKER
	}
	var r io.Reader
	var total int64
	switch {
	case kind == "oci":
		out.Format = sandseav1.ArchiveFormat_ARCHIVE_FORMAT_OCI
		if _, err := os.Stat(filepath.Join(source, "oci-layout")); err != nil {
			return nil, errdefs.New(errdefs.Invalid, source, "no OCI image layout: it has no file oci-layout").
				WithHint("Name the directory that holds it").Wrap(err)
		}
		pr, pw := io.Pipe()
		go func() { pw.CloseWithError(packTree(source, pw)) }()
		defer pr.CloseWithError(io.ErrClosedPipe)
		r = pr
	case source == "-":
		r = a.input(ctx)
	default:
		f, err := os.Open(source)
		if err != nil {
			return nil, fmt.Errorf("image import: %w", err)
		}
		defer f.Close()
		st, err := f.Stat()
		if err != nil {
			return nil, fmt.Errorf("image import: %w", err)
		}
		if st.IsDir() {
			return nil, errdefs.New(errdefs.Invalid, source, "is a directory").WithHint("Name a file; a directory with an OCI layout is oci:DIR")
		}
		r, total = f, st.Size()
	}
	m := &meter{r: r, p: p, name: "upload", total: total}
	upload, err := c.UploadImage(ctx, m)
	if err != nil {
		return nil, err
	}
	out.Upload = upload
	return out, nil
}

func (a *app) imageLsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List images", Args: cobra.NoArgs,
		Example: "  sandsea image ls\n  sandsea image ls --json | jq -r '.[].name'",
		RunE: func(cmd *cobra.Command, _ []string) error {
			list, err := a.images(cmd.Context())
			if err != nil {
				return err
			}
			if a.json {
				return printJSON(a.io.Out, documents("sandsea.image/1", list))
			}
			if len(list) == 0 {
				a.io.Note("No images yet. About a minute: sandsea image import debian:bookworm --include python3,git")
				return nil
			}
			a.paged(cmd.Context(), func() { a.printImages(list) })
			return nil
		},
	}
}

func (a *app) printImages(list []*sandseav1.Image) {
	var rows [][]ui.Cell
	for _, i := range list {
		digest := i.GetDigest()
		if a.io.OutTTY {
			digest = digest[:min(len(digest), shortDigest)]
		}
		rows = append(rows, []ui.Cell{
			{Text: ui.Text(i.GetName())},
			{Text: ui.Text(digest)},
			{Text: fmt.Sprint(len(i.GetLayers()))},
			{Text: ui.Size(imageBytes(i))},
			{Text: fmt.Sprint(i.GetUsers())},
			{Text: span.Short(a.now().Sub(i.GetCreatedAt().AsTime()))},
		})
	}
	a.io.Table([]ui.Column{
		{Name: "NAME", Cut: true, Drop: 2},
		{Name: "DIGEST", Drop: 4},
		{Name: "LAYERS", Right: true, Drop: 3},
		{Name: "SIZE", Right: true},
		{Name: "USERS", Right: true, Drop: 1},
		{Name: "AGE", Right: true},
	}, rows)
}

// shortDigest is "sha256:" and twelve digits.
const shortDigest = 19

func (a *app) imageInspectCommand() *cobra.Command {
	return &cobra.Command{
		Use: "inspect REF", Short: "Show an image's layers and config", Args: cobra.ExactArgs(1),
		Example: "  sandsea image inspect debian:bookworm\n  sandsea image inspect debian:bookworm --json | jq .layers",
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			res, err := c.Images.Get(cmd.Context(), connect.NewRequest(&sandseav1.GetImageRequest{Ref: args[0]}))
			if err != nil {
				return err
			}
			if a.json {
				return printJSON(a.io.Out, document("sandsea.image/1", res.Msg.GetImage()))
			}
			a.printImage(res.Msg.GetImage())
			return nil
		},
	}
}

func (a *app) printImage(img *sandseav1.Image) {
	cfg := img.GetConfig()
	a.section("Image", row("name", "%s", img.GetName()), row("digest", "%s", img.GetDigest()), row("source", "%s", imageSource(img)),
		row("size", "%s", ui.LongSize(imageBytes(img))), row("users", "%s", sandboxes(int(img.GetUsers()))),
		row("made", "%s ago", span.Short(a.now().Sub(img.GetCreatedAt().AsTime()))))
	a.section("Config", row("user", "%s", cfg.GetUser()), row("workdir", "%s", cfg.GetWorkdir()), row("env", "%s", strings.Join(cfg.GetEnv(), " ")),
		row("entrypoint", "%s", quoted(cfg.GetEntrypoint())), row("cmd", "%s", quoted(cfg.GetCmd())))
	var layers [][2]string
	for i, l := range slices.Backward(img.GetLayers()) {
		layers = append(layers, row(fmt.Sprint(i), "%s  %s, %d files, %s", l.GetDigest(), ui.LongSize(l.GetBytes()), l.GetFiles(), l.GetSource()))
	}
	a.section("Layers", layers...)
}

// imageSource is where the layers came from, each place once, the lowest first.
func imageSource(img *sandseav1.Image) string {
	var all []string
	for _, l := range img.GetLayers() {
		if !slices.Contains(all, l.GetSource()) {
			all = append(all, l.GetSource())
		}
	}
	return strings.Join(all, ", ")
}

// quoted shows where one argument ends and the next begins, as the image's config spells them.
func quoted(argv []string) string {
	if len(argv) == 0 {
		return ""
	}
	b, err := json.Marshal(argv)
	if err != nil {
		return fmt.Sprintf("%q", argv)
	}
	return string(b)
}

func (a *app) imageRmCommand() *cobra.Command {
	var dry bool
	cmd := &cobra.Command{
		Use: "rm REF…", Short: "Remove images and the layers that nothing else uses", Args: cobra.MinimumNArgs(1),
		Long:    "Asks when sandboxes use the image, which keep its layers, and when its record cannot be read.",
		Example: "  sandsea image rm task-17\n  sandsea image rm --dry-run task-17 task-18",
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			if len(args) == 1 {
				return a.removeImage(cmd.Context(), c, args[0], dry)
			}
			var failed error
			for _, ref := range args {
				if err := a.removeImage(cmd.Context(), c, ref, dry); err != nil {
					a.complain(err)
					failed = &exitError{code: 1}
				}
			}
			return failed
		},
	}
	cmd.Flags().BoolVar(&dry, "dry-run", false, "only list what would go")
	return cmd
}

func (a *app) removeImage(ctx context.Context, c *client.Client, ref string, dry bool) error {
	img, doubt := &sandseav1.Image{Name: ref}, ""
	got, err := c.Images.Get(ctx, connect.NewRequest(&sandseav1.GetImageRequest{Ref: ref}))
	switch {
	case errors.Is(err, errdefs.DataLoss):
		doubt = "its record cannot be read"
	case err != nil:
		return err
	default:
		if img = got.Msg.GetImage(); img.GetUsers() > 0 {
			doubt = "in use by " + sandboxes(int(img.GetUsers()))
		}
	}
	if dry {
		fmt.Fprintln(a.io.Out, ui.Text(img.GetName()))
		return nil
	}
	if doubt != "" {
		yes, asked := a.io.Ask(fmt.Sprintf("%s: %s. Sandboxes keep its layers. Remove it?", ui.Text(ref), doubt))
		if !asked {
			return misuse(errdefs.New(errdefs.FailedPrecondition, "image "+ref, "%s; no terminal to ask on", doubt).
				WithHint("Add --yes"))
		}
		if !yes {
			return nil
		}
	}
	res, err := c.Images.Delete(ctx, connect.NewRequest(&sandseav1.DeleteImageRequest{Ref: ref, Force: doubt != ""}))
	if err != nil {
		return err
	}
	if a.json {
		return printJSON(a.io.Out, object{{"schema", "sandsea.image_rm/1"}, {"name", img.GetName()}, {"freed_bytes", res.Msg.GetFreedBytes()}})
	}
	a.io.Note("removed %s, %s freed", ui.Text(img.GetName()), ui.LongSize(res.Msg.GetFreedBytes()))
	return nil
}

func (a *app) imageComposeCommand() *cobra.Command {
	var base, workspace string
	var toolkits []string
	cmd := &cobra.Command{
		Use:     "compose NAME --base REF [--workspace REF] [--toolkit REF]…",
		Short:   "Name a stack of images",
		Example: "  sandsea image compose task-17 --base debian:bookworm --workspace src-17 --toolkit pytest",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if base == "" {
				return usage(cmd, "image compose: name the lowest image: --base REF")
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			res, err := c.Images.Compose(cmd.Context(), connect.NewRequest(&sandseav1.ComposeImageRequest{
				Name: args[0], Base: base, Workspace: workspace, Toolkits: toolkits,
			}))
			if err != nil {
				return err
			}
			img := res.Msg.GetImage()
			if a.json {
				return printJSON(a.io.Out, document("sandsea.image/1", img))
			}
			a.io.Note("%s: %s, %s", ui.Text(img.GetName()), counted(len(img.GetLayers()), "layer", "layers"), ui.LongSize(imageBytes(img)))
			fmt.Fprintln(a.io.Out, img.GetDigest())
			return nil
		},
	}
	cmd.Flags().StringVar(&base, "base", "", "lowest image")
	cmd.Flags().StringVar(&workspace, "workspace", "", "image above the base")
	cmd.Flags().StringSliceVar(&toolkits, "toolkit", nil, "images above the workspace, lowest first")
	return cmd
}
