"""Entry scripts of the form that users of CPM-Pretrain have, with its imports, calls and keywords, and nothing of ours."""
