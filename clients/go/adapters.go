package sluice

import (
	"context"

	pb "example.com/sluice/go/sluicev1"
)

// maxAdapters is the most adapters of one answer.
const maxAdapters = 1000

// LoadAdapter loads an adapter from the server's folder of adapters, and names it. Of several servers it is one that
// does; any loads a folder, or a repository that it allows, when a request names it.
func (c *Client) LoadAdapter(ctx context.Context, request *pb.LoadAdapterRequest) (*pb.Adapter, error) {
	var answer *pb.LoadAdapterResponse
	err := c.unary(ctx, func(ctx context.Context, used *line) (err error) {
		answer, err = pb.NewControlServiceClient(used.connection).LoadAdapter(ctx, request)
		return err
	})
	if err != nil {
		return nil, err
	}
	return answer.Adapter, nil
}

// UnloadAdapter takes an adapter's name away. Its generations go on to their ends, or for the request's Grace.
func (c *Client) UnloadAdapter(ctx context.Context, request *pb.UnloadAdapterRequest) error {
	return c.unary(ctx, func(ctx context.Context, used *line) error {
		_, err := pb.NewControlServiceClient(used.connection).UnloadAdapter(ctx, request)
		return err
	})
}

// Adapters returns the adapters that are loaded, by name.
func (c *Client) Adapters(ctx context.Context) ([]*pb.Adapter, error) {
	var found []*pb.Adapter
	size := uint32(maxAdapters)
	for token := ""; ; {
		var page *pb.ListAdaptersResponse
		err := c.unary(ctx, func(ctx context.Context, used *line) (err error) {
			request := &pb.ListAdaptersRequest{PageSize: &size, PageToken: token}
			page, err = pb.NewControlServiceClient(used.connection).ListAdapters(ctx, request)
			return err
		})
		if err != nil {
			return nil, err
		}
		found = append(found, page.Adapters...)
		if token = page.NextPageToken; token == "" {
			return found, nil
		}
	}
}
