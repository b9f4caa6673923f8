// Command gen makes api/openapi/openapi.json anew from the .proto files. Run it in the root of the repository; it needs
// protoc for the comments.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/sandsea/sandsea/api/openapi"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "openapi:", err)
		os.Exit(1)
	}
}

func run() error {
	files, err := openapi.Commented(context.Background(), "api")
	if err != nil {
		return err
	}
	doc, err := openapi.Document(files)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join("api", "openapi", "openapi.json"), doc, 0o644) //nolint:gosec // a source file
}
