"""The model families that come with Perdure: a file each, named as its `model_type`, with its
`Family` under the name FAMILY."""
