// nerdctl is built in a copy of its module, with its own go.mod and go.sum
// (recipes/nerdctl.bash): this one pins its version and its checksum.
module github.com/gpuckpt/gpuckpt/hack/nerdctl

go 1.26.6

require (
	github.com/containerd/nerdctl/v2 v2.2.2
)
