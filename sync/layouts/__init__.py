"""Adapters: how trainer backends and rollout engines hold a model, described as boxes in Hugging Face names (W1).

| file | who holds the weights |
| --- | --- |
| `modules.py` | a plain torch module, whole, heads tied or not |
| `dtensor.py` | FSDP2, HSDP, FSDP with tensor parallelism: any DTensor |
| `megatron.py` | megatron-core ranks: tensor, pipeline (also virtual), expert and expert-tensor parallel |
| `served.py` | an inference engine that splits a model over tensor- and expert-parallel ranks |

`model.py` lists the tensors of a model from its `config.json`, and how each may be split. `held.py` ties a box to the
memory of a parameter. All but `dtensor.py` and `modules.py` are arithmetic: no torch, no framework, no process.
"""
