"""An assault on the command line: strange commands, damaged files, killed processes.

    python tests/assault.py [--seconds N] [--seed S] [--root DIR] [--only commands|damage|kills]

commands   Every command ends with exit code 0, or with another and a sentence as the last line of stderr; never with a
           traceback, the report of a bug or a signal, and never not at all. Those of COMMANDS, then random ones.
damage     A file of FILES is cut, emptied, overwritten in part, or one bit of it flipped. The command that reads it
           says so, or its result is that of the whole file: it is never silently another.
kills      A command of KILLS is killed at random moments and given again until it ends: what it leaves is bit for bit
           what a run leaves that was not disturbed.

Without --seconds a fixed number of each is tried, the same for the same seed, as tests/test_assault.py does. To try
more things, add lines to the tables. Torch is imported once: each try is a fork of this process, in a folder of its
own, a copy of one small world of data, runs and foreign files. --root assaults the program in another folder.
"""
import argparse
import contextlib
import functools
import glob
import hashlib
import importlib
import itertools
import json
import math
import os
import random
import re
import resource
import runpy
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from typing import NamedTuple

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
os.environ.pop("TRITON_INTERPRET", None)  # tests have it

import torch  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# Commands as in a shell: VAR=value before, `< FILE`, `| true` (a reader that has left) or `2>&-` (closed) at the end;
# {a,b} is a line with each, {word} is one of WORDS. `new` before it: in a new interpreter. RANK=0:1 is two ranks.
# The mark says how it should end:
#     0 well    1 with a sentence    ? either    ~ either, but that may take long: it gets a Ctrl-C after 3 seconds
# What stands after `  # ` is checked, too: `says REGEX` or `never REGEX` of what it prints, `leaves FILE`.
COMMANDS = r"""
0 {train,sample,view,eval,sae,probe,circuits,pareto,noise,judge,retrieve,report}.py --help  # says usage|python
0 {data,plot,export,ngram,kloosterman,toyworld,bench,kernels,budget}.py --help  # says usage|python
1 train.py small.py --out=new --layers={1e999,-1,0,0.5,nan,'-"a"','"a"',{deep},{deepminus},{digits},{byte},true,''}
1 train.py small.py --out=new --{seed=1e30,vocab_size=1e18,d=1e18,context=1e18,batch_tokens=1e30,heads=0,bits=1e9}
1 train.py small.py --out=new --vocab_size=1e7 --d=32768 --heads=1 --bottleneck=none
1 train.py small.py --out=new --device={foo,mps,meta,cuda,''}
1 train.py small.py --out={small.py,/sys/new,/proc/self/mem}
1 train.py small.py --out=new --data={nowhere,{byte},{long},small.py,listed,foreign}
1 train.py {latin1,deep,deepminus,zero,missing}.py --out=new
1 train.py {data,/proc/self/mem,'',small.py small.py} --out=new
1 train.py
1 RANK={0,x} train.py small.py --out=new
1 RANK=0:1:2 train.py small.py --out=new  # says evenly
1 train.py small.py --out={foreign,out/plain,out/short}
1 train.py small.py --out=new --init_from={foreign/ckpt,plain,bare,short,mute}.pt
1 train.py small.py --out=new --init_from=pickle.pt  # never weights_only
1 train.py small.py --out=new --init_from=cut.pt  # never another model
1 train.py small.py --out=new --init_from={nowhere,{long},small.py,data}
1 train.py small.py --out=new --init_from=out/run --data=data/book  # says tokenizer
1 train.py small.py --out=gone  # leaves gone/best.pt
1 train.py small.py --out=out/run --fresh=true --wandb=true  # leaves out/run/ckpt.pt
~ train.py small.py --out=new --max_steps=1e9  # leaves new/ckpt.pt
0 train.py small.py --out=new {| true,2>&-}  # leaves new/best.pt
0 train.py small.py --out={emoji}
? train.py small.py --out={torn,strange}
1 sample.py out/run --device {cuda,foo,meta} --prompt The
? sample.py out/run --tokens 3 --prompt The --seed {18446744073709551615,18446744073709551616,{digits}}
? sample.py out/run --tokens 3 --prompt The --temperature {nan,inf,1e-40,1e-310,1e308}
? sample.py out/run --tokens 3 --prompt {{byte},{emoji},{long},''}
1 sample.py out/run --tokens 3 --vector vector.npz --alpha {nan,inf,1e39}
? sample.py out/run --tokens 3 --vector vector.npz --samples 2 --alphas {nan,1e38,1e999,-1e38}
? sample.py out/run --tokens 3 --vector vector.npz --alpha 1e38
1 sample.py out/run --tokens 3 --vector vector.npz --steer cars
0 sample.py out/run --tokens 3 --fit 1 --k 4 --interactive < talk
? sample.py out/run --tokens 3 --interactive < latin1.txt
0 COLUMNS={4,1,0} sample.py out/run --tokens 3 --vector vector.npz
0 PYTHONIOENCODING=ascii sample.py out/run --tokens 3 {--prompt {emoji},--features --prompt {emoji}}
1 sample.py {plain,foreign/ckpt,bare,short,wide,typed,mute,old}.pt --prompt The
1 sample.py {out/plain,nowhere,data,small.py,vector.npz,{byte}} --prompt The
1 sample.py pickle.pt --prompt The  # never weights_only
1 sample.py out/run --vector {out/run/features.npz,foreign.npz,best.pt,data,/proc/self/mem}
1 sample.py out/dense --features --prompt The
1 sample.py out/run --features --prompt The --source {nowhere,topk,jumprelu,data,{byte},{long},''}
1 sample.py out/{run,dense} --features --prompt The --source out/dense/sae/topk-mlp_in-{7,} --site mlp_out
1 sample.py out/run --feature 0:3+ --source out/dense/sae/topk-mlp_in-0  # says other weights
0 sample.py out/{run,dense} --features --prompt The --source {hash,neurons} --site {mlp_in,block_out}
1 sample.py out/run --features --prompt The --source hash --site {mlp,{byte},''}
0 sample.py out/dense --feature 0:3+ --source {topk,out/dense/sae/topk-mlp_in-0,neurons}
1 sample.py out/dense --feature {0:256+,2:1+} --source topk
1 sample.py out/dense --tokens 3 --vector vector.npz --source topk
1 sae.py out/dense --{site=x,variant=x,variant=,layers=9,layers=,layers=x,k=100000,width=0,steps=0,lr=0,lr=nan,seed=-1}
1 sae.py out/dense --steps 16 --batch-tokens 64 --eval-tokens 64 --{k=5,steps=17,lr=0.1,seed=1,batch-tokens=65}
1 sae.py out/dense --steps 16 --batch-tokens 64 --eval-tokens 64 --variant matryoshka --width 31
1 sae.py {nowhere,data,small.py,foreign/ckpt.pt,plain.pt,{byte}}
1 sae.py out/dense/sae/topk-mlp_in-0 --export {saelens,saelens:,x:new,sparsify:data,saelens:small.py,saelens:/sys/new}
1 sae.py out/{run,dense} --export saelens:new
0 sae.py out/dense/sae/topk-mlp_in-0 --export {saelens,dictionary_learning,sparsify}:new
1 sae.py out/dense --layers 0 --import {data,nowhere,small.py,{byte},out/dense/sae/topk-mlp_in-0,foreign}
0 sae.py out/run --steps 4 --batch-tokens 64 --eval-tokens 64 {| true,2>&-}  # leaves out/run/sae/report-mlp_in.json
0 sae.py out/run --steps 4 --batch-tokens 64 --eval-tokens 64 --layers 1 --site {mlp_in,block_out} --variant jumprelu
0 probe.py truth out/run --tokens 256 --sources {own,hash,random}
1 probe.py truth out/run --tokens 256 --sources {topk,x,{byte},''}
1 probe.py truth {nowhere,data,small.py,plain.pt,{byte}}
1 probe.py {x,truth}
? probe.py truth out/run --tokens 256 --sources own {| true,2>&-}
0 probe.py out/run --positive book.txt --negative docs.jsonl --features 2 --sources {own,hash,neurons,random}
0 probe.py out/dense --positive book.txt --negative docs.jsonl --features 2 --sources {topk,hash} --site mlp_in
0 probe.py out/run --dry-run --features 2 --sources own  # says would be asked
1 probe.py out/run --positive book.txt --negative {nowhere,data,latin1.txt,null,{byte},''}
1 probe.py out/run --features 2 {--positive book.txt,--texts nowhere,--texts data,--layers 9,--layers=-1,--layers x}
1 probe.py out/run --{layers=,judge=x,judge=openai:,judge=,correlation=2,correlation=nan,seed=-1,features=0,site=x}
1 probe.py out/run --positive book.txt --negative docs.jsonl --sources {topk,x,{byte},''}
1 probe.py {nowhere,data,small.py,plain.pt,{byte}} --saebench
1 probe.py geometry {--widths 7,--widths x,--widths=,--worlds 0,--worlds x,--out nope}
? circuits.py out/run --against out/dense --pairs 4 --choose 4 --site {mlp_in,block_out}
1 circuits.py out/run --pairs 4 --choose 4 {--site x,--tasks {byte},--tasks x,--answer x,--against out/run}
1 circuits.py {nowhere,data,small.py,plain.pt,{byte}}
? pareto.py out/run --sae none --concepts sea --prefix-count 2 --tokens 3 --fit 1 --k 4 --ratios 1 {| true,2>&-}
1 pareto.py out/run --sae none --tokens 3 --concepts {{byte},'',x,latin1.txt,deep.jsonl,digits.jsonl,data}
1 pareto.py out/run --sae none --tokens 3 --judge {x,openai:,run:nowhere,run:plain.pt,{byte},''}
1 pareto.py out/run --sae none --tokens 3 --prefixes {latin1.txt,data,null,nowhere,{byte}}
1 pareto.py out/run --sae none --tokens 3 --ratios {0,nan,-1,'',x,1e999}
1 pareto.py out/run --sae none --tokens 3 --ratios 2,1
1 pareto.py out/run --sae none {--tokens 0,--tokens {digits},--prefix-count 1,--prefix-words 0,--dry-run,--batch 0}
1 pareto.py out/dense --tokens 3 --sae {x,jumprelu,{byte},''}
1 pareto.py {nowhere,data,small.py,plain.pt,{byte}}
1 OPENAI_BASE_URL={file:///etc,ftp://x,x,http://} pareto.py out/run --sae none --tokens 3 --judge openai:m
1 OPENAI_BASE_URL= OPENAI_API_KEY= judge.py openai:m text  # says OPENAI_API_KEY
1 OPENAI_API_KEY={emoji} judge.py openai:m text  # says copy it again
1 judge.py {x,openai:,openai,run:out/run,{byte}} text
0 noise.py out/run --tokens 64
1 noise.py out/run --tokens 64 --{layer=9,layer=-1,layer=x,tokens=0,device=foo}
0 retrieve.py index out/run --documents 9 {--source hash,--source neurons --layer 0,--pooling last,--window 4 --top 9}
1 retrieve.py index out/run --documents 9 --{data=nowhere,data=foreign,data={byte},layer=9,source=x,out=/sys/x,window=0}
1 retrieve.py index out/run --documents 9 --data data/book  # says another tokenizer
1 retrieve.py index out/run --documents {0,-1,nan,{digits},x}
0 retrieve.py query out/run The --k {1,99} --names 0
? retrieve.py query out/run {{byte},{emoji},{long},' '} --names 1 --last
1 retrieve.py query out/run {'',The --index nowhere,The --index book.txt,The --index null,The --layer 0}
1 retrieve.py query out/run The --source hash  # says retrieve.py index
1 retrieve.py query out/dense The --index out/run/retrieve/own-1.postings  # says other weights
1 retrieve.py {tune,sweep,measure} out/run  # says retrieve.py make|retrieve.py tune|retrieve.py sweep
1 retrieve.py make out/run --{poisoned=1e9,clean=1e9,trigger=xyzzy,trigger={byte},queries=0,repeats=0,seed=-1,seed=x}
? retrieve.py make out/run --poisoned 12 --corpus-poisoned 4 --clean 9 --queries 2 --repeats 1
1 retrieve.py all out/run --poisoned 4 --corpus-poisoned 9
1 retrieve.py {all,make,tune,sweep,measure,index} {nowhere,data,small.py,plain.pt,{byte}}
1 retrieve.py {x,all,query out/run}
0 bench.py index --documents 99 --features 50 --top 8 --width 8 --queries 1 --out new.postings
1 bench.py index --{documents=0,documents=x,top=0,budget=0,queries=0,out=/sys/x}
0 report.py --list {--quick,--only tokens,--out new}  # says python
0 report.py --list --only circuits,probe  # says python circuits.py
0 report.py --page --out {new,{emoji}}  # says index.html
1 report.py --only {x,{byte},'',{long}}  # says there is no step
1 report.py --page --out {small.py,/sys/new,/proc/self/mem}
1 report.py --docs {--out nowhere,--out data}  # says no report
1 report.py --docs --quick  # says no source
1 report.py --list --page  # says not allowed
1 report.py --only data  # says in the folder of the repository
1 report.py {x,--quick=1,--only}
1 budget.py --parity {nowhere,latin1.py,data,{byte},''}
1 budget.py --parity small.py --dense {nowhere,{long}}
1 budget.py --parity small.py --dense small.py --{budgets=1,budgets=x,seeds=0,seeds=x,steps=0,out=book.txt}
0 sample.py out/run --top-features --index-tokens 256
0 view.py out/run --effects {0,8} {,| true,2>&-}  # leaves out/run/features.html
0 view.py out/dense --source {topk,neurons,out/dense/sae/topk-mlp_in-0} --effects 8
0 view.py out/run --source hash --site block_out --effects 8 --index-tokens 64
1 view.py out/dense  # says sae.py
1 view.py out/run --{source=x,source=topk,source={byte},source=,site=x,index-tokens=0,effects=-1,device=foo}
1 view.py out/run --effects 8 --serve --{port=65536,port=x,port=-1,vector=nowhere,vector=plain.pt,vector=data}
1 view.py {nowhere,data,small.py,foreign/ckpt.pt,plain.pt,pickle.pt,vector.npz,{byte},''}
? view.py {loud,nan}.pt --effects 8 --index-tokens 64
? view.py out/listed --effects 8
~ view.py out/run --effects 8 --serve --port 0  # says http://127.0.0.1
1 RANK=0:1:2 sae.py out/run --steps 16 --batch-tokens 64 --eval-tokens 64  # says evenly
1 sample.py out/run --prompt-file {/proc/self/mem,latin1.txt,data,null}
1 sample.py out/run --feature {{digits}:1,0:{digits},9:9,x,0:3*}
? sample.py out/run --tokens 3 --steer sea --fit 1 --k 4 --samples 1 --save-vector {/sys/x.npz,data,nope/x.npz}
? sample.py out/run --tokens 3 --prompt The {| true,2>&-}
1 eval.py out/run --tasks hellaswag --data {latin1,deep,digits,label7,label-1,string,empty,none,list,nowhere}
1 eval.py out/run --tasks lambada --data {latin1,no_word,list}
? eval.py out/{run,dense} --tasks answers --limit {1,3}
0 eval.py out/run --tasks hellaswag,lambada --data good
? eval.py out/run --tasks lambada --data long_word
? eval.py out/listed --tasks val
1 eval.py out/run --text missing.txt  # never nats per token
1 eval.py out/run --tasks ppl --text {deep.jsonl,digits.jsonl,latin1.txt,data,null}
1 eval.py out/run --val {data/book,listed,nowhere}
1 eval.py out/run --device {foo,meta,cuda}
? eval.py {loud,nan}.pt --tasks val,features,lambada,hellaswag,ppl --text book.txt --limit 2 --data {good,long_word}
? sample.py {loud,nan}.pt --tokens 3 --prompt The {--features,--steer sea --fit 1 --k 4 --samples 1,--feature 0:3+}
1 eval.py {foreign/ckpt,plain,bare,short,typed,mute,pickle}.pt
? eval.py out/run --tasks val {| true,2>&-}
0 export.py out/{run,dense} --to {new,hf,{emoji}}
0 export.py --from hf --out {new,{emoji}}  # says best.pt
? export.py {loud.pt,out/run} --to {new,{byte},{long}}
1 export.py {,out/run,--to new,hf --from hf,--from hf --to new,--from hf --push x,out/run --to new --out new}
1 export.py {nowhere,data,small.py,plain.pt,bare.pt,short.pt,wide.pt,mute.pt,nan.pt,cut.pt,{byte},''} --to new
1 export.py pickle.pt --to new  # never weights_only
1 export.py out/run --to {small.py,data,out,/sys/new,/proc/self/mem,''}
1 export.py --from {nowhere,data,small.py,foreign,listed,out/run,{byte},{long},''} --out new
1 export.py --from hf --out {out/run,data,small.py,/sys/new,/proc/self/mem}
? export.py out/run --to new {| true,2>&-}
1 data.py text {deep.jsonl,latin1.txt,list.jsonl,latin1.py,data,missing,{byte}.txt,null} --tokenizer bpe:300 --out new
? data.py text digits.jsonl --tokenizer bpe:300 --out new
1 data.py text book.txt --tokenizer {bpe:{digits},bpe:0,bpe:x,latin1,listed,{byte}} --out new
1 data.py text book.txt --tokenizer bpe:300 --out {/sys/new,small.py,/proc/self/mem}
? data.py text docs.jsonl --tokens 500 --tokenizer bpe:300 --out new  # never give more text
1 data.py {info,check} {foreign,listed,nowhere,small.py}
1 plot.py out/run --out /nope/x.png
0 plot.py out/run --out x  # says x.png
? plot.py {torn,strange} --out x.png
? plot.py out/run --out {data,x.nope,{byte},null,''}
1 plot.py {nowhere,small.py}
1 ngram.py {listed,small.py,nowhere,{byte},'',a b}
1 kloosterman.py {0,7,65536}  # says power of two
1 kloosterman.py {-8,x,{digits},²,''}
? toyworld.py --documents 3 | true
? toyworld.py {--documents -1,--documents 0,--seed {digits},--seed -1}
1 bench.py --rows tiny --variants dense {--batch -1,--batch 0,--repeats 0,--repeats -1,--patience -1,--patience nan}
1 bench.py --rows small_2l --variants dense --layers {0,-1}
1 bench.py --rows tiny --variants dense --repeats 1 --json /nope/x  # never dense
1 bench.py dpb {--d 0,--d 100,--d 1e9,--tokens 0,--tokens -1}
0 bench.py dpb --d 128 --tokens 8 --repeats 1
? bench.py dpb --d 256 --tokens 8 --repeats 1 | true
1 new TRITON_INTERPRET=1 kernels.py
"""

# Base commands for random ones : the flags to add to them.
RANDOM = r"""
train.py small.py --out=new : {settings}
train.py small.py --out=out/run : {settings}
sample.py out/run --tokens 2 --prompt The : --device --prompt --samples --tokens --temperature --top-k --top-p --seed
sample.py out/run --features --prompt The : --prompt --prompt-file --top --device
sample.py out/run --feature 0:3+ : --feature --top --index-tokens
sample.py out/run --tokens 2 --samples 1 --fit 1 --k 4 --steer sea : --steer --alpha --k --fit --positive --negative
sample.py out/run --tokens 2 --samples 1 --fit 1 --vector vector.npz : --steer --alpha --alphas --vector --save-vector
sample.py out/dense --tokens 2 --samples 1 --fit 1 --steer sea : --alpha --alphas --layer --k --save-vector --vector
sample.py out/dense --features --prompt The --source topk : --source --site --top
view.py out/run --effects 8 : --source --site --index-tokens --effects --device --port
sae.py out/dense --steps 4 --batch-tokens 64 --eval-tokens 64 --fresh : --site --variant --layers --k
sae.py out/dense --report --eval-tokens 64 : --site --against --device --eval-tokens
probe.py out/run --positive book.txt --negative docs.jsonl --features 2 --sources own : --layers --site --features
retrieve.py index out/run --documents 9 : --data --source --layer --window --pooling --top --out --split --device
retrieve.py query out/run The --names 1 : --index --k --names --source --layer --device
retrieve.py make out/run --poisoned 12 --corpus-poisoned 4 --clean 9 --queries 2 : --trigger --sham --clean --seed
eval.py out/run --limit 2 : --tasks --limit --text --data --val --context --stride --device --batch_tokens
eval.py out/run --tasks hellaswag,lambada --data good : --limit --data --context --device --batch_tokens
export.py out/run --to new : --to --from --out
export.py --from hf --out new : --from --out
data.py text book.txt --tokenizer bpe:300 --out new : --out --tokens --tokenizer --field --val-fraction --shard-tokens
data.py toy --tokens 2000 --out new : --out --tokens
data.py info data/book :
data.py check data/book :
plot.py out/run --out x.png : --out
ngram.py data/book :
kloosterman.py 64 :
toyworld.py --documents 2 : --seed --documents
bench.py dpb --d 256 --tokens 8 --repeats 1 : --d --levels --tokens --repeats
bench.py generate --rows tiny --tokens 2 --repeats 1 : --rows --layers --tokens --repeats --json
"""
VALUES = r"""
0 -1 1 2 3 7 0.5 -0.5 1e999 nan inf -inf 1e30 1e-40 1e12 4294967296 18446744073709551616 {digits} true None () [] (1,2)
{long} {deep} {deepminus} {emoji} {byte} é %s {} '' ' ' "'" '"' '-"a"' 1,2 0,nan , : 0:0 a=b -- -x *.txt . ..
data out/run out/run/best.pt small.py book.txt missing null /proc/self/mem /sys/new nope/x.npz locked cut.pt pickle.pt
foreign.npz torn deep.jsonl listed latin1
"""
LONG = ("--max_steps", "--tokens", "--samples", "--fit", "--documents", "--repeats", "--layers", "--batch", "--context",
        "--d", "--k", "kloosterman.py")  # with a large value these may take long, and rightly
WORDS = {"deep": "[" * 10_000 + "]" * 10_000, "deepminus": "-" * 10_000 + "1", "digits": "9" * 5_000,
         "long": "x" * 10_000, "emoji": "🐚", "byte": os.fsdecode(b"\xff")}

# File to damage : command that reads it : what must be as if it were whole; a file with ? may differ if that is said.
FILES = r"""
out/run/ckpt.pt : train.py small.py --out=out/run : out/run/ckpt.pt out/run/best.pt out/run/metrics.jsonl
out/run/ckpt.pt : sample.py out/run/ckpt.pt --tokens 5 --prompt The : stdout
out/run/best.pt : sample.py out/run --tokens 5 --prompt The : stdout
out/run/best.pt : train.py small.py --out=new --init_from=out/run : new/ckpt.pt
out/run/metrics.jsonl : plot.py out/run --out x.png : x.png?
out/half/metrics.jsonl : train.py small.py --out=out/half : out/half/ckpt.pt out/half/metrics.jsonl?
out/run/config.json : eval.py out/run --tasks val : stdout
out/run/eval.json : eval.py out/run --tasks val : stdout out/run/eval.json
out/run/features.npz : sample.py out/run --feature 0:3+ : stdout
out/run/retrieve/own-1.postings : retrieve.py query out/run The --names 0 : stdout
out/run/features.npz : view.py out/run --effects 64 : out/run/features.html
out/run/view/effects-own-00000.npz : view.py out/run --effects 64 : out/run/features.html
out/run/view/figures.jsonl : view.py out/run --effects 64 : out/run/features.html
out/dense/sae/topk-mlp_in-0/sae.safetensors : sample.py out/dense --features --prompt The --source topk : stdout
out/dense/sae/topk-mlp_in-1/config.json : sample.py out/dense --features --prompt The --source topk : stdout
hf/model.safetensors : export.py --from hf --out new : new/best.pt
hf/config.json : export.py --from hf --out new : new/best.pt
hf/tokenizer.json : export.py --from hf --out new : new/best.pt
hf/checksums.json : export.py --from hf --out new : new/best.pt
vector.npz : sample.py out/run --tokens 5 --samples 1 --vector vector.npz : stdout
data/world/state.json : data.py info data/world : stdout
data/world/state.json : data.py check data/world : stdout
data/world/state.json : train.py small.py --out=new : new/ckpt.pt
data/world/tokenizer.json : data.py info data/world : stdout
data/world/tokenizer.json : data.py check data/world : stdout
data/world/tokenizer.json : ngram.py data/world : stdout
data/world/train_00000.bin : data.py check data/world : stdout
data/world/train_00000.bin : ngram.py data/world : stdout
.cache/paritytransformer/kernels-*.so : sample.py out/run --features --prompt The : stdout
"""
SAID = r"damaged|left out|lost|anew|gathering where|^wrote "

# Command to kill : what it must leave.
KILLS = r"""
train.py small.py --out=new --max_steps=8 --save_every=1 : new/ckpt.pt new/best.pt new/metrics.jsonl
train.py small.py --out=new --max_steps=8 --save_every=3 : new/ckpt.pt new/best.pt new/metrics.jsonl
data.py text book.txt docs.jsonl --tokenizer bpe:400 --shard-tokens 500 --out new : new/*
data.py toy --tokens 3000 --out new : new/*
export.py out/run --to new : new/*
export.py --from hf --out new : new/*
sae.py out/run --steps 16 --batch-tokens 64 --eval-tokens 64 --variant jumprelu : out/run/sae/*/sae.safetensors
retrieve.py index out/run --source hash : out/run/retrieve/hash-mlp_in-1.postings
view.py out/dense --source topk --effects 64 : out/dense/features-topk-mlp_in.html
"""

# The world

SMALL = b"""
layers = 2; d = 32; heads = 2; context = 32; vocab_size = 2048; bits = (5, 8); active = (4, 6); children = (16,)
batch_tokens = 128; max_steps = 4; warmup_steps = 1; eval_every = 2; eval_tokens = 256; save_every = 2; log_every = 1
data = "data/world"; device = "cpu"
"""
MAKE = (
    "data.py toy --out data/world --tokens 20000",
    "data.py text book.txt --out data/book --tokenizer bpe:300 --val-fraction 0.3",
    "train.py small.py --out=out/run",
    "train.py small.py --out=out/dense --bottleneck=none",
    "sae.py out/dense --steps 16 --batch-tokens 64 --eval-tokens 64",
    "sample.py out/run --feature 0:3+",
    "sample.py out/run --steer sea --fit 1 --k 4 --tokens 2 --samples 1 --save-vector vector.npz",
    "eval.py out/run --tasks val,features",
    "retrieve.py index out/run --documents 20",
    "view.py out/run --effects 64",
    "export.py out/run --to hf")
TALK = b"The,/steer sea nan,The,/alpha inf,The,/steer sea 1e38,The,/seed 99999999999999999999,The,/seed x,/alpha,/x"


class Foreign:
    """What a checkpoint should not hold."""
    def __reduce__(self):
        return print, ("a pickle was executed",)


def foreign_checkpoints():
    ours = torch.load("out/run/best.pt", weights_only=True)
    short = ours | {"model": dict(list(ours["model"].items())[1:])}
    return {
        "foreign/ckpt.pt": {"step": 1}, "out/plain/ckpt.pt": {"model": ours["model"], "step": 1}, "bare.pt": [1, 2],
        "plain.pt": ours["model"], "short.pt": short, "out/short/ckpt.pt": short, "mute.pt": ours | {"tokenizer": {}},
        "old.pt": ours | {"config": {}}, "typed.pt": ours | {"config": {"d": "x"}}, "pickle.pt": Foreign(),
        "wide.pt": ours | {"config": ours["config"] | {"d": 64}},
        "loud.pt": scaled(ours, 100), "nan.pt": scaled(ours, math.nan)}


def scaled(checkpoint, by):
    model = {key: value * by if value.is_floating_point() else value for key, value in checkpoint["model"].items()}
    return checkpoint | {"model": model}


def foreign_files():
    deep, digits = b'{"text": ' + b"[" * 200_000 + b"]" * 200_000 + b"}\n", b'{"text": ' + b"9" * 5_000 + b"}\n"
    best, metrics = read("out/run/best.pt"), read("out/run/metrics.jsonl")
    strange = b'[1]\n"a"\n{"step": "x", "loss": null}\n\xff\n{"step": 1e400, "loss": ' + b"[" * 9999 + b"\n"
    endings = ["sank.", "sailed.", "ate.", "sang."]
    question = {"activity_label": "A", "ctx_a": "The ship", "ctx_b": "then", "endings": endings, "label": 1}
    changes = {"good": {}, "label7": {"label": 7}, "label-1": {"label": -1}, "string": {"endings": "abcd"},
               "empty": {"endings": [*endings[:3], ""]}, "none": {"endings": []}}
    return {
        "cut.pt": best[:-1000], "gone/best.pt": b"best", "gone/metrics.jsonl": metrics,
        "torn/metrics.jsonl": metrics[:-20], "strange/metrics.jsonl": strange + metrics, "foreign/state.json": b"{}",
        "foreign.npz": b"PK\3\4", "talk": TALK.replace(b",", b"\n"), "out/listed/best.pt": best,
        "deep.jsonl": deep, "digits.jsonl": digits, "list.jsonl": b"[1]\n", "latin1.txt": b"caf\xe9 " * 999,
        "latin1.py": b'data = "caf\xe9"\n', "zero.py": b"d = 32\0", "deep.py": b"d = " + WORDS["deep"].encode(),
        "deepminus.py": b"d = " + WORDS["deepminus"].encode(), "out/listed/eval.json": b"[1]",
        "listed/state.json": b"[1]", "listed/tokenizer.json": b"[1]", "latin1/tokenizer.json": b"\xff",
        **{f"{name}/hellaswag_val.jsonl": json.dumps(question | change).encode() for name, change in changes.items()},
        "latin1/hellaswag_val.jsonl": b'{"label": "\xe9"}\n', "latin1/lambada_test.jsonl": b'{"text": "\xe9"}\n',
        "deep/hellaswag_val.jsonl": deep, "digits/hellaswag_val.jsonl": digits, "list/hellaswag_val.jsonl": b"[1]\n",
        "list/lambada_test.jsonl": b"[1]\n", "good/lambada_test.jsonl": b'{"text": "The sailor saw the sea"}\n',
        "no_word/lambada_test.jsonl": b'{"text": ""}\n',
        "long_word/hellaswag_val.jsonl": json.dumps(question).encode(),
        "long_word/lambada_test.jsonl": b'{"text": "The ' + random.Random(0).randbytes(1500).hex().encode() + b'"}\n'}


def make_world(folder):
    documents = [text for text, _ in sys.modules["toyworld"].documents(7, 60)]
    os.makedirs(folder)
    with contextlib.chdir(folder):
        write("small.py", SMALL)
        write("book.txt", "\n\n".join(documents).encode() * 3)
        write("docs.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in documents).encode())
        os.makedirs("locked", mode=0o555)
        os.symlink(os.devnull, "null")
        for line in MAKE:
            must_work(line, folder)
        shutil.copytree("out/run", "out/half")
        os.replace("out/half/ckpt.prev.pt", "out/half/ckpt.pt")
        os.remove("out/dense/ckpt.pt")
        os.remove("out/dense/ckpt.prev.pt")
        for name, content in (foreign_files() | foreign_checkpoints()).items():
            write(name, content)


def must_work(line, folder):
    ended = run(parse(line), folder)
    if ended.code:
        raise SystemExit(f"assault.py: this should work: {line}\n{ended.out}{ended.err}")
    return ended


@contextlib.contextmanager
def copy_of(world):
    folder = tempfile.mkdtemp(dir=os.path.dirname(world))
    shutil.copytree(world, folder, symlinks=True, dirs_exist_ok=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read(path):
    with open(path, "rb") as file:
        return file.read()


def write(path, content):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "wb") as file:
        file.write(content) if isinstance(content, bytes) else torch.save(content, file)


# One command


class Command(NamedTuple):
    line: str
    mark: str
    checks: list       # of (says | never | leaves, what)
    script: str
    arguments: list
    environment: dict
    new: bool          # in a new interpreter
    stdin: str
    left: bool         # nobody reads its stdout
    closed: bool       # it has no stderr


def parse(line):
    mark, line = (line[0], line[2:]) if line[1] == " " else ("?", line)
    command, *checks = line.split("  # ")
    words = [re.sub(r"\{(\w+)\}", lambda found: WORDS.get(found[1], found[0]), word) for word in shlex.split(command)]
    new, left, closed, stdin = words[0] == "new", words[-2:] == ["|", "true"], words[-1] == "2>&-", os.devnull
    words = words[new : len(words) - 2 * left - closed]
    if "<" in words[-2:-1]:
        *words, _, stdin = words
    first = next(place for place, word in enumerate(words) if word.endswith(".py"))
    environment = dict(word.split("=", 1) for word in words[:first])
    checks = [check.split(" ", 1) for check in checks]
    return Command(line, mark, checks, words[first], words[first + 1:], environment, new, stdin, left, closed)


def expand(line):
    """The lines for which one with {a,b} stands."""
    found = re.search(r"\{((?:[^{}]|\{\w*\})*,(?:[^{}]|\{\w*\})*)\}", line)
    if not found:
        return [line]
    return [more for part in found[1].split(",") for more in expand(line[: found.start()] + part + line[found.end():])]


class Ended(NamedTuple):
    code: int          # minus the number of a signal
    out: str
    err: str
    seconds: float
    killed: bool       # by us


def run(command, folder, limit=60.0, kill=None):
    """Run a command in a folder to its end; what has not come to it by the limit, or by `kill` seconds, is killed."""
    sys.stdout.flush()
    began, paths = time.monotonic(), [f"{folder}.out", f"{folder}.err"]
    pid = os.fork()
    if not pid:
        try:
            become(command, folder, *paths)
        finally:
            os._exit(99)  # whatever happens, this is no second assault

    def wait(seconds):
        while not (done := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() - began < seconds:
            time.sleep(0.002)
        return done

    done, status = wait(3 if command.mark == "~" else kill or limit)
    if not done and command.mark == "~":
        os.kill(pid, signal.SIGINT)
        done, status = wait(limit)
    if not done:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    seconds = time.monotonic() - began
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what it may have started
    out, err = (read(path)[:10 ** 6].decode(errors="replace") if os.path.exists(path) else "" for path in paths)
    return Ended(os.waitstatus_to_exitcode(status), out, err, seconds, not done)


def become(command, folder, out, err):
    """In a child: be the process that a shell would have started."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it would be ignored
    os.chdir(folder)
    os.environ |= {"HOME": folder, "XDG_CACHE_HOME": f"{folder}/.cache", "TMPDIR": folder} | command.environment
    tempfile.tempdir = folder
    resource.setrlimit(resource.RLIMIT_AS, (8 * 2 ** 30,) * 2)
    for number, path, flags in ((0, command.stdin, os.O_RDONLY), (1, out, os.O_WRONLY), (2, err, os.O_WRONLY)):
        os.dup2(os.open(path, flags | (os.O_CREAT | os.O_TRUNC | os.O_APPEND if number else 0)), number)
    if command.left:
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.close(reader)
        os.close(writer)
    rank, *others = os.environ.get("RANK", "").split(":")
    if others:
        with socket.create_server(("localhost", 0)) as free:
            port = str(free.getsockname()[1])
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": str(len(others) + 1)}
        rank = next((other for other in others if not os.fork()), rank)
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
    path = os.path.join(ROOT, command.script)
    if command.new:
        os.execv(sys.executable, [sys.executable, path, *command.arguments])
    encoding = os.environ.get("PYTHONIOENCODING", "utf-8")
    sys.stdin, sys.stdout = open(0, encoding="utf-8", closefd=False), open(1, "w", encoding=encoding, closefd=False)
    sys.stderr = open(2, "w", 1, encoding=encoding, errors="backslashreplace", closefd=False)
    if command.closed:
        os.close(2)
        sys.stderr = None
    sys.__stdout__, sys.__stderr__, sys.argv, code = sys.stdout, sys.stderr, [path, *command.arguments], 0
    try:
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            if isinstance(stop.code, str) and sys.stderr:
                print(stop.code, file=sys.stderr)
        sys.stdout.flush()
    except BaseException:
        code = 1
        if sys.stderr:
            traceback.print_exc()
    os._exit(code)


def complaint(command, ended, folder):
    """What is wrong with how a command ended; "" if nothing is."""
    printed, last = ended.out + ended.err, (ended.err.strip().splitlines() or [""])[-1]
    if ended.killed:
        return "it hangs"
    if ended.code < 0:
        return f"killed by {signal.Signals(-ended.code).name}"
    if "Traceback" in printed or "Exception ignored" in printed:
        return "a traceback"
    if "this is a bug" in printed:
        return "a bug is reported"
    quiet = command.closed or command.left and not ended.err
    if ended.code and not quiet and not re.match(rf"{command.script}( [\w-]+)?: .", last):
        return f"exit code {ended.code} without a sentence"
    if command.mark in "01" and bool(ended.code) != int(command.mark):
        return "it should be refused" if ended.code == 0 else "it should work"
    for kind, what in command.checks:
        there = os.path.exists(os.path.join(folder, what)) if kind == "leaves" else re.search(what, printed)
        if bool(there) == (kind == "never"):
            return f"it should be: {kind} {what}"
    return ""


def results(folder, ended, names):
    """What a command made: its lines and the files of these names, without what tells the time."""
    found = {}
    for path in sorted(path for name in names for path in glob.glob(os.path.join(folder, name.rstrip("?")))):
        content = read(path)
        if path.endswith(".pt"):
            saved = torch.load(path, weights_only=True)
            tensors = b"".join(tensor.numpy().tobytes() for tensor in saved["model"].values())
            content = tensors + repr([saved["step"], saved["best"], *saved["model"]]).encode()
        elif path.endswith(".jsonl"):
            content = re.sub(rb', "(tokens_per_second|crc)": \d+', b"", content)
        found[os.path.relpath(path, folder)] = hashlib.sha256(content).hexdigest()
    if "stdout" in names:
        time_told = r"[\d.,]+(?= (per second|MB|tokens/s|seconds|ms))"
        lines = [re.sub(time_told, "N", line) for line in ended.out.splitlines()]
        found["stdout"] = [line for line in lines if not re.search(SAID, line)]
    return found


# The three assaults: without end, (what was tried, how it ended, what is wrong)


def assault_commands(world, rng):
    """The table, then random commands."""
    for line in itertools.chain(fixed_commands(), iter(lambda: random_command(rng), None)):
        command = parse(line)
        with copy_of(world) as folder:
            ended = run(command, folder)
            yield command.line, ended, complaint(command, ended, folder)


def fixed_commands():
    return [each for line in COMMANDS.strip().splitlines() for each in expand(line)]


def random_command(rng):
    """A base command with up to three flags more, or with one of its words replaced."""
    base, _, flags = rng.choice(RANDOM.strip().splitlines()).partition(" :")
    settings = " ".join(f"--{key}=" for key in sys.modules["config"].KEYS)
    base, flags, values = base.split(), flags.replace("{settings}", settings).split(), shlex.split(VALUES)
    for flag in rng.choices(flags, k=rng.choice((1, 1, 2, 3))) if flags and rng.random() < 0.85 else ():
        value = shlex.quote(rng.choice(values))
        base += [flag + value] if flag.endswith("=") else [flag, value]
    if not flags or rng.random() < 0.15:
        base[rng.randrange(1, len(base))] = shlex.quote(rng.choice(values))
    mark = "~" if any(word.startswith(LONG) for word in base) else "?"
    return f"{mark} {' '.join(base)}"


def assault_files(world, rng):
    """The files of the table in each of four ways, again and again."""
    ways = itertools.cycle(("cut", "flipped", "overwritten", "emptied"))
    for how, (name, line, names) in ((how, row) for how in ways for row in rows(FILES)):
        command, (whole, _) = parse(line), undisturbed(world, line, names)
        with copy_of(world) as folder:
            where = damage(glob.glob(os.path.join(folder, name))[0], how, rng)
            ended = run(command, folder)
            wrong = complaint(command, ended, folder)
            if not wrong and not ended.code:
                found, said = results(folder, ended, names.split()), re.search(SAID, ended.out + ended.err)
                excused = {name.rstrip("?") for name in names.split() if said and name.endswith("?")}
                differ = [key for key in whole if found.get(key) != whole[key] and key not in excused]
                wrong = f"silently another result: {', '.join(differ)}" if differ else ""
            yield f"{name} {how}{where}: {line}", ended, wrong


def damage(path, how, rng):
    """Damage a file at a random place; gives where."""
    content = bytearray(read(path))
    size, at, bit = len(content), rng.randrange(len(content)), rng.randrange(8)
    stop = min(size, at + rng.randint(1, 5000))
    if how == "cut":
        del content[at:]
    elif how == "flipped":
        content[at] ^= 1 << bit
    elif how == "overwritten":
        content[at:stop] = rng.randbytes(stop - at)
    else:
        content.clear()
    write(path, bytes(content))
    return {"cut": f" at {at}", "flipped": f" in bit {bit} of byte {at}", "emptied": "",
            "overwritten": f" from {at} to {stop}"}[how] + f" of {size}"


def assault_processes(world, rng):
    """The commands of the table, again and again, each killed up to three times and then left to end."""
    for line, names in itertools.cycle(rows(KILLS)):
        command, (whole, seconds) = parse(line), undisturbed(world, line, names)
        with copy_of(world) as folder:
            moments = [rng.uniform(0, seconds) for _ in range(3)]
            hit = [moment for moment in moments if run(command, folder, kill=moment).killed]
            ended = run(command, folder)
            wrong, found = complaint(command, ended, folder), results(folder, ended, names.split())
            differ = [key for key in sorted(whole.keys() | found.keys()) if found.get(key) != whole.get(key)]
            if not wrong and (ended.code or differ):
                wrong = f"it does not end as if nothing had happened: {', '.join(differ)}"
            yield f"killed after {', '.join(f'{moment:.3f} s' for moment in hit)}: {line}", ended, wrong


def rows(table):
    return [[part.strip() for part in line.split(" : ")] for line in table.strip().splitlines()]


@functools.cache
def undisturbed(world, line, names):
    """What a command makes if nothing is done to it, and its seconds."""
    with copy_of(world) as folder:
        ended = must_work(line, folder)
        return results(folder, ended, names.split()), ended.seconds


ASSAULTS = {  # and how many tries at least
    "commands": (assault_commands, len(fixed_commands()) + 60),
    "damage": (assault_files, 4 * len(rows(FILES))),
    "kills": (assault_processes, 3 * len(rows(KILLS))),
}


def show(kind, seed, number, line, ended, wrong):
    printed = (ended.err.strip() or ended.out.strip() or "(nothing)").splitlines()
    shown = [text[:200] for text in (printed if len(printed) < 6 else printed[:2] + ["..."] + printed[-3:])]
    print(f"FAILED {kind}, seed {seed}, try {number}: {wrong}\n    {line}", *shown, sep="\n        ", flush=True)


def main():
    global ROOT
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0, help="go on for so long (default: a fixed number of tries)")
    parser.add_argument("--seed", type=int, default=0, help="of what is random")
    parser.add_argument("--root", default=ROOT, help="folder of the program to assault")
    parser.add_argument("--only", choices=ASSAULTS, help="one of the three")
    options = parser.parse_args()
    ROOT = os.path.abspath(options.root)
    sys.path.insert(0, ROOT)
    for name in ("matplotlib.pyplot", "train", "sample", "eval", "bench", "ngram", "toyworld"):
        importlib.import_module(name)
    kinds, counts = [options.only] if options.only else list(ASSAULTS), {}
    memory = "/dev/shm"  # ten times as fast as a disk
    memory = memory if os.path.isdir(memory) and shutil.disk_usage(memory).free > 2 ** 30 else None
    with tempfile.TemporaryDirectory(dir=memory, ignore_cleanup_errors=True) as scratch:
        world = os.path.join(scratch, "world")
        make_world(world)
        for kind in kinds:
            assault, least = ASSAULTS[kind]
            end, counts[kind] = time.monotonic() + options.seconds / len(kinds), [0, 0, 0, 0]
            for line, ended, wrong in assault(world, random.Random(f"{options.seed} {kind}")):
                for place, true in enumerate((True, not wrong and not ended.code, not wrong and ended.code, wrong)):
                    counts[kind][place] += bool(true)
                if wrong:
                    show(kind, options.seed, counts[kind][0], line, ended, wrong)
                if counts[kind][0] >= least and time.monotonic() > end:
                    break
    print(f"\n{'':10}{'tried':>8}{'exit 0':>8}{'sentence':>10}{'failures':>10}")
    for kind, (tried, well, told, failed) in counts.items():
        print(f"{kind:10}{tried:8}{well:8}{told:10}{failed:10}")
    sys.exit(any(failed for *_, failed in counts.values()))


if __name__ == "__main__":
    main()
