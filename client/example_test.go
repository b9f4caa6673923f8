package client_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"strings"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
)

// A sandbox from an image, one command in it, and its end.
func ExampleClient() {
	ctx := context.Background()
	c, err := client.New(client.Config{}) // SANDSEA_URL and SANDSEA_TOKEN, or the server of this machine
	if err != nil {
		log.Fatal(err)
	}
	sb, err := c.Create(ctx, &sandseav1.SandboxSpec{
		Environment: &sandseav1.Environment{Image: "py"},
		Limits:      &sandseav1.Limits{MemoryBytes: 1 << 30},
	}, "")
	if err != nil {
		log.Fatal(err)
	}
	defer sb.Stop(ctx)

	res, err := sb.Run(ctx, client.Shell("echo hello; exit 3"))
	if err != nil {
		log.Fatal(err) // the platform's failure; the command's own is in the result
	}
	fmt.Printf("%s%d\n", res.GetStdout(), res.GetResult().GetExitCode())
	// Output:
	// hello
	// 3
}

// With a key a create may be repeated until its outcome is known: it makes one sandbox.
func ExampleClient_Create() {
	ctx := context.Background()
	c, err := client.New(client.Config{})
	if err != nil {
		log.Fatal(err)
	}
	spec := &sandseav1.SandboxSpec{Environment: &sandseav1.Environment{Image: "py"}}
	sb, err := c.Create(ctx, spec, "rollout-17")
	for errors.Is(err, errdefs.Unknown) || errors.Is(err, errdefs.Unavailable) {
		sb, err = c.Create(ctx, spec, "rollout-17")
	}
	if err != nil {
		log.Fatal(err)
	}
	defer sb.Stop(ctx)
	fmt.Println(len(sb.ID))
	// Output: 27
}

// Output as it comes. After a broken link, Attach goes on at an offset.
func ExampleSandbox_Start() {
	ctx := context.Background()
	c, err := client.New(client.Config{})
	if err != nil {
		log.Fatal(err)
	}
	sb, err := c.Create(ctx, &sandseav1.SandboxSpec{Environment: &sandseav1.Environment{Image: "py"}}, "")
	if err != nil {
		log.Fatal(err)
	}
	defer sb.Stop(ctx)
	for ev, err := range sb.Start(ctx, &sandseav1.StartRequest{Command: client.Shell("echo one; echo two")}) {
		if err != nil {
			log.Fatal(err)
		}
		os.Stdout.Write(ev.GetData().GetData())
		if p := ev.GetExited(); p != nil {
			fmt.Println("exit", p.GetResult().GetExitCode())
		}
	}
	// Output:
	// one
	// two
	// exit 0
}

// Files of any size, streamed.
func ExampleSandbox_WriteFile() {
	ctx := context.Background()
	c, err := client.New(client.Config{})
	if err != nil {
		log.Fatal(err)
	}
	sb, err := c.Create(ctx, &sandseav1.SandboxSpec{Environment: &sandseav1.Environment{Image: "py"}}, "")
	if err != nil {
		log.Fatal(err)
	}
	defer sb.Stop(ctx)
	if _, err := sb.WriteFile(ctx, &sandseav1.WriteFileHeader{Path: "/work/a.txt"}, strings.NewReader("text\n")); err != nil {
		log.Fatal(err)
	}
	_, err = sb.ReadFile(ctx, &sandseav1.ReadFileRequest{Path: "/work/a.txt"}, os.Stdout)
	fmt.Println(err)
	_, err = sb.ReadFile(ctx, &sandseav1.ReadFileRequest{Path: "/work/b.txt"}, os.Stdout)
	fmt.Println(errors.Is(err, errdefs.NotFound))
	// Output:
	// text
	// <nil>
	// true
}
