package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
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
	var name, user, workdir, reference string
	var include, env, entrypoint, command []string
	var refresh bool
	cmd := &cobra.Command{
		Use:   "import SRC",
		Short: "Make an image from Debian packages or an archive",
		Long: `SRC is one of
  debian:SUITE       Debian packages, no registry needed; more by --include
  oci:DIR            an OCI image layout
  rootfs:FILE.tar    a root file system, plain or compressed; - is standard input`,
		Example: `  sandsea image import debian:bookworm --include python3,git
  sandsea image import rootfs:task-17.tar --name task-17
  sandsea image import oci:build/image --name app`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			kind, rest, ok := strings.Cut(args[0], ":")
			if !ok || rest == "" {
				return usage("image import %s: write debian:SUITE, oci:DIR or rootfs:FILE.tar", ui.Text(args[0]))
			}
			req := &sandseav1.ImportImageRequest{Name: name, Config: &sandseav1.ImageConfig{
				User: user, Workdir: workdir, Env: env, Entrypoint: entrypoint, Cmd: command,
			}}
			p := a.io.NewProgress()
			defer p.Clear()
			began := time.Now()
			switch kind {
			case "debian":
				req.Source = &sandseav1.ImportImageRequest_Debian{Debian: &sandseav1.DebianSource{
					Suite: rest, Include: include, Refresh: refresh,
				}}
			case "rootfs", "oci":
				archive, err := a.upload(cmd.Context(), kind, rest, p)
				if err != nil {
					return err
				}
				archive.Reference = reference
				req.Source = &sandseav1.ImportImageRequest_Archive{Archive: archive}
				if name == "" {
					req.Name = strings.TrimSuffix(strings.SplitN(filepath.Base(rest), ".tar", 2)[0], "/")
				}
			default:
				return usage("image import: %s: is not known; write debian:SUITE, oci:DIR or rootfs:FILE.tar", ui.Text(kind))
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			img, existed, err := c.ImportImage(cmd.Context(), req, func(ip *sandseav1.ImportProgress) {
				p.Update(ip.GetStage(), ip.GetDone(), ip.GetTotal(), ip.GetUnit(), ip.GetDetail(), ip.GetFinished())
			})
			p.Clear()
			if err != nil {
				return err
			}
			return a.imported(img, existed, time.Since(began))
		},
	}
	fl := cmd.Flags()
	fl.StringVar(&name, "name", "", "name of the image (default: from the source)")
	fl.StringSliceVar(&include, "include", nil, "debian: more packages")
	fl.BoolVar(&refresh, "refresh", false, "debian: ask the package index again")
	fl.StringVar(&reference, "reference", "", "oci: which of several images")
	fl.StringVar(&user, "user", "", "default user")
	fl.StringVar(&workdir, "workdir", "", "default working directory")
	fl.StringArrayVarP(&env, "env", "e", nil, "environment variable, as K=V")
	fl.StringSliceVar(&entrypoint, "entrypoint", nil, "entrypoint")
	fl.StringSliceVar(&command, "cmd", nil, "command")
	return cmd
}

// imported prints the digest on standard output and the rest beside it.
func (a *app) imported(img *sandseav1.Image, existed bool, took time.Duration) error {
	if a.json {
		doc, err := document("sandsea.image/1", img)
		if err != nil {
			return err
		}
		doc["existed"] = existed
		return printJSON(a.io.Out, doc)
	}
	if existed {
		a.io.Note("%s: already here, same content (--refresh asks again)", ui.Text(img.GetName()))
	} else {
		a.io.Note("%s  %s, %s", ui.Text(img.GetName()), ui.LongSize(imageBytes(img)), ui.Took(took))
		a.io.Note("Try it: sandsea run --image %s -- ls /", ui.Text(img.GetName()))
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
func (a *app) upload(ctx context.Context, kind, source string, p *ui.Progress) (*sandseav1.ArchiveSource, error) {
	c, err := a.client()
	if err != nil {
		return nil, err
	}
	out := &sandseav1.ArchiveSource{Format: sandseav1.ArchiveFormat_ARCHIVE_FORMAT_ROOTFS}
	var r io.Reader
	var total int64
	switch {
	case kind == "oci":
		out.Format = sandseav1.ArchiveFormat_ARCHIVE_FORMAT_OCI
		if _, err := os.Stat(filepath.Join(source, "oci-layout")); err != nil {
			return nil, errdefs.New(errdefs.Invalid, source, "no OCI image layout: it has no file oci-layout").Wrap(err)
		}
		pr, pw := io.Pipe()
		go func() { pw.CloseWithError(packTree(source, pw)) }()
		defer pr.CloseWithError(io.ErrClosedPipe)
		r = pr
	case source == "-":
		r = a.io.In
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
		r, total = f, st.Size()
	}
	m := &meter{r: r, p: p, name: "upload", total: total}
	out.Upload, err = c.UploadImage(ctx, m)
	return out, err
}

func (a *app) imageLsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List images", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			list, err := a.images(cmd.Context())
			if err != nil {
				return err
			}
			if a.json {
				docs, err := documents("sandsea.image/1", list)
				if err != nil {
					return err
				}
				return printJSON(a.io.Out, docs)
			}
			if len(list) == 0 {
				a.io.Note("No images yet. About a minute: sandsea image import debian:bookworm --include python3,git")
				return nil
			}
			var rows [][]ui.Cell
			for _, i := range list {
				digest := i.GetDigest()
				if a.io.OutTTY {
					digest = digest[:min(len(digest), 19)]
				}
				rows = append(rows, []ui.Cell{
					{Text: ui.Text(i.GetName())}, {Text: digest}, {Text: fmt.Sprint(len(i.GetLayers()))}, {Text: ui.Size(imageBytes(i))},
					{Text: fmt.Sprint(i.GetUsers())}, {Text: ui.Age(time.Since(i.GetCreatedAt().AsTime()))},
				})
			}
			a.io.Table([]ui.Column{
				{Name: "NAME", Cut: true}, {Name: "DIGEST", Drop: 2},
				{Name: "LAYERS", Right: true, Drop: 1}, {Name: "SIZE", Right: true}, {Name: "USERS", Right: true}, {Name: "AGE", Right: true},
			}, rows)
			return nil
		},
	}
}

func (a *app) getImage(ctx context.Context, ref string) (*sandseav1.Image, error) {
	c, err := a.client()
	if err != nil {
		return nil, err
	}
	res, err := c.Images.Get(ctx, connect.NewRequest(&sandseav1.GetImageRequest{Ref: ref}))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetImage(), nil
}

func (a *app) imageInspectCommand() *cobra.Command {
	return &cobra.Command{
		Use: "inspect REF", Short: "Show an image's layers and config", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			img, err := a.getImage(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if a.json {
				doc, err := document("sandsea.image/1", img)
				if err != nil {
					return err
				}
				return printJSON(a.io.Out, doc)
			}
			fmt.Fprintf(a.io.Out, "name     %s\ndigest   %s\nsize     %s\nusers    %d\n", ui.Text(img.GetName()), img.GetDigest(),
				ui.LongSize(imageBytes(img)), img.GetUsers())
			cfg := img.GetConfig()
			fmt.Fprintf(a.io.Out, "user     %s\nworkdir  %s\nenv      %s\nruns     %s\n", ui.Text(cfg.GetUser()), ui.Text(cfg.GetWorkdir()),
				ui.Text(strings.Join(cfg.GetEnv(), " ")), ui.Text(strings.Join(append(cfg.GetEntrypoint(), cfg.GetCmd()...), " ")))
			for i, l := range img.GetLayers() {
				fmt.Fprintf(a.io.Out, "layer %-2d %s  %s, %d files, %s\n", i, l.GetDigest(), ui.LongSize(l.GetBytes()), l.GetFiles(), ui.Text(l.GetSource()))
			}
			return nil
		},
	}
}

func (a *app) imageRmCommand() *cobra.Command {
	return &cobra.Command{
		Use: "rm REF…", Short: "Remove images and the layers that nothing else uses", Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			var errs []error
			for _, ref := range args {
				img, err := a.getImage(cmd.Context(), ref)
				if err != nil {
					errs = append(errs, err)
					continue
				}
				force := false
				if img.GetUsers() > 0 {
					yes, asked := a.io.Ask(fmt.Sprintf("%d sandboxes use %s and keep its layers. Remove it?", img.GetUsers(), ui.Text(ref)))
					if !asked {
						return &exitError{code: 2, err: errdefs.New(errdefs.FailedPrecondition, "image "+ref,
							"%d sandboxes use it; no terminal to ask on", img.GetUsers()).WithHint("Add --yes")}
					}
					if !yes {
						continue
					}
					force = true
				}
				res, err := c.Images.Delete(cmd.Context(), connect.NewRequest(&sandseav1.DeleteImageRequest{Ref: ref, Force: force}))
				if err != nil {
					errs = append(errs, err)
					continue
				}
				a.io.Note("removed %s, %s freed", ui.Text(ref), ui.LongSize(res.Msg.GetFreedBytes()))
			}
			if len(errs) > 1 {
				return errors.Join(errs...)
			}
			if len(errs) == 1 {
				return errs[0]
			}
			return nil
		},
	}
}

func (a *app) imageComposeCommand() *cobra.Command {
	var base, workspace string
	var toolkits []string
	cmd := &cobra.Command{
		Use:     "compose NAME --base REF [--workspace REF] [--toolkit REF]…",
		Short:   "Name a stack of images",
		Example: "  sandsea image compose task-17 --base debian:bookworm+python3 --workspace task-17-src --toolkit pytest",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
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
			return a.imported(res.Msg.GetImage(), false, 0)
		},
	}
	cmd.Flags().StringVar(&base, "base", "", "lowest image")
	cmd.Flags().StringVar(&workspace, "workspace", "", "image above the base")
	cmd.Flags().StringSliceVar(&toolkits, "toolkit", nil, "images above the workspace, lowest first")
	_ = cmd.MarkFlagRequired("base")
	return cmd
}
