// Tiny is the one program of an image that has nothing else.
package main

import (
	"fmt"
	"os"
	"strconv"
	"time"
)

func main() {
	switch {
	case len(os.Args) > 2 && os.Args[1] == "exit":
		fmt.Println("bye")
		code, _ := strconv.Atoi(os.Args[2])
		os.Exit(code)
	case len(os.Args) > 1 && os.Args[1] == "wait":
		fmt.Println("waiting")
		time.Sleep(time.Hour)
	}
	dir, err := os.Getwd()
	fmt.Println(os.Getuid(), os.Getgid(), dir, err, os.Getenv("HOME"), os.Getenv("PATH"), os.Args[1:])
}
