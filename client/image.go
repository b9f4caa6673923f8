package client

import (
	"context"
	"io"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
)

// UploadImage hands an archive to the server and returns the name under which ImportImage finds it.
func (c *Client) UploadImage(ctx context.Context, r io.Reader) (string, error) {
	res, err := upload(ctx, c.Images.Upload, nil, r,
		func(b []byte) *sandseav1.UploadImageRequest { return &sandseav1.UploadImageRequest{Data: b} })
	return res.GetUpload(), err
}

// ImportImage makes an image; progress is called for every step and may be nil. existed says that an equal one was here.
func (c *Client) ImportImage(ctx context.Context, req *sandseav1.ImportImageRequest,
	progress func(*sandseav1.ImportProgress),
) (img *sandseav1.Image, existed bool, err error) {
	err = each(ctx, c.Images.Import, req, func(m *sandseav1.ImportImageResponse) error {
		if p := m.GetProgress(); p != nil && progress != nil {
			progress(p)
		}
		if i := m.GetImage(); i != nil {
			img, existed = i, m.GetExisted()
		}
		return nil
	})
	return img, existed, err
}
