"""How a model that knows no ranks is spread over them. The only door is `parallelize`, in the
module of that name. Nothing is imported here: inputs are checked without DTensor and FSDP."""
