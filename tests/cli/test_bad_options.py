"""Commands with bad options: one line names the option and the value, and nothing is written."""

import shlex

import pytest

pytest.importorskip("typer")

SIZE = "must be bytes >= 1 or a size such as '64GiB', '64GB' or '1.5TiB'"
BAD = [
    ("bench copy --sizes 4KiB,fast", f"--sizes {SIZE}, got 'fast'"),
    ("bench copy --blocks 0", "--blocks must be >= 1, got 0"),
    ("bench copy --threads 0", "--threads must be a whole number >= 1, such as 10000 or '10k', got '0'"),
    ("bench copy --bytes 1MiB --sizes 4MiB", "--bytes must hold a block of 4194304 bytes, got '1MiB'"),
    ("bench copy --device tpu", "--device must be cpu or cuda, got 'tpu'"),
    ("bench disk . --size 1KiB", "--size must hold at least one block of 2097152 bytes, got '1KiB'"),
    ("bench disk . --size 999999TiB", "--size must fit into the ... free in ., got '999999TiB'"),
    ("bench disk missing", "folder must be one that exists, got 'missing'"),
    ("bench disk TRACE", "folder must be one that exists, got"),
    ("bench tier valkey", "the tier must be JSON such as"),
    ("bench tier [1]", 'the tier must be a JSON object with "type"'),
    ("""bench tier '{"type": "tape"}'""", "unknown tier 'tape'"),
    ("""bench tier '{"type": "memory"}'""", "a memory tier needs 'capacity'"),
    ("""bench tier '{"type": "memory", "capacity": "1MiB", "spede": 1}'""", "unknown options of a memory tier: spede"),
    ("check engine.json --data-parallel-size 0", "--data-parallel-size must be >= 1, got 0"),
    ("check", "name the configuration to check"),
    ("check nowhere.json", "nowhere.json cannot be read: No such file or directory"),
    ("demo --requests 0", "--requests must be >= 1, got 0"),
    ("demo --seed -1", "--seed must be >= 0, got -1"),
    ("demo --memory 99999TiB", "--memory must be less than 2**30 blocks (65536 bytes each), got '99999TiB'"),
    ("demo --blocks 1073741824", "--blocks must be less than 2**30 blocks (65536 bytes each), got '1073741824'"),
    ("demo --policy lru,arc", "--policy must name one policy, got 'lru,arc': kvcache plan FILE compares several"),
    ("demo --policy min", "--policy min is the optimum of a trace: kvcache plan FILE --policy min"),
    ("demo --what-if", "--what-if was removed: use 'record', and `kvcache plan` on the recording"),
    ("demo --block-bytes 100", "block_bytes must be a multiple of 8, got 100"),
    ("demo --memory 900TiB --block-bytes 1GiB", "a pool of 989560464998400 bytes (921600.0 GiB) does not fit into"),
    ("fleet TRACE --engines 2 --router best", "--router must be of round_robin, prefix, events, known, got 'best'"),
    ("fleet TRACE --engines 3:x", "--engines must be a whole number >= 0"),
    ("fleet TRACE --engines 2 --blocks 10+x", "--blocks must be a whole number >= 0"),
    ("fleet TRACE --engines 0", "--engines must be a whole number >= 1"),
    ("fleet TRACE --engines 2 --memory 1TiB", "--memory needs the size of a block, got '1TiB' alone"),
    ("fleet TRACE --engines 2 --store 1TiB", "--store needs the size of a block, got '1TiB'"),
    ("fleet TRACE --engines 2 --store 1B --model 2", "--store must hold at least one block of 1024 bytes, got '1B'"),
    ("fleet TRACE --engines 2 --plot missing/out.png", "--save cannot be written: 'missing/out.png'"),
    ("fleet TRACE --engines 2 --copies 0", "--copies must be a whole number >= 1"),
    ("fleet TRACE --engines 2 --copies 1@0%", "--copies must be N@BUSY with a share above 0"),
    ("fleet TRACE --engines 2 --blocks 9@1GB/s", "--blocks with a rate needs the size of a block"),
    (
        "fleet TRACE --engines 2 --server 5GB/s",
        "--server must be RATE,KEYS[,EVENTS], as in 2.5GB/s,900k,690k, got '5GB/s'",
    ),
    ("fleet TRACE --engines 2 --server 5GB/s,1k,0", "--server must be a whole number >= 1"),
    ("fleet TRACE --engines 1B --blocks 1k", "a fleet of 1,000,000,000 engines of 1,000"),
    ("fleet TRACE --engines 2 --plot x.html", "--save of a fleet must end in .png or .svg"),
    ("plan TRACE --policy lru,,min", "unknown policy '', known ones: lru"),
    ("plan TRACE --save out.pdf", "--save must end in .csv, .png, .svg, .html, got 'out.pdf'"),
    ("plan TRACE --save missing/out.csv", "--save cannot be written: 'missing/out.csv'"),
    ("plan TRACE --jobs 0", "--jobs must be a whole number >= 1, such as 10000 or '10k', got '0'"),
    ("plan TRACE --policy lru,arc,lru", "policy 'lru' is named twice"),
    ("plan TRACE --blocks 0,5", "--blocks must be a whole number >= 1"),
    ("plan TRACE --model gpt-9", "unknown model 'gpt-9', known ones: llama-3.1-8b"),
    ("plan TRACE --model llama-3.1-8", "unknown model 'llama-3.1-8', known ones: ... ; did you mean 'llama-3.1-8b'?"),
    ("plan TRACE --model qwen3-8b,int4", "--model takes bf16, fp16, fp32, fp8, int8, params=N and flops=N behind the"),
    ("plan TRACE --model 0x2x64", "num_layers must be an int >= 1, got 0"),
    ("plan TRACE --model 4KiB,fp8", "--model takes no dtype behind the bytes of a token, got '4KiB,fp8'"),
    ("plan TRACE --model none.json", "model config 'none.json' cannot be read: No such file or directory"),
    ("plan TRACE --model qwen3-8b,params=nan", "--model: params must be a number > 0, got"),
    ("plan TRACE --model qwen3-8b,flops=0", "--model: flops must be a number > 0, got"),
    (
        "plan TRACE --policy min --tier 1GiB@1GB/s --model 2KiB",
        "--policy min is the optimum of host memory alone and knows no tiers, got --tier '1GiB@1GB/s'",
    ),
    ("plan TRACE --tier 1TiB@6GB/s", "--tier needs the size of a block, got '1TiB@6GB/s' alone"),
    ("plan TRACE --tier 1TiB@6GB --model 2", "--tier must be a rate such as 6GB/s, got '6GB'"),
    ("plan TRACE --tier 1B@6GB/s,fast --model 2", "--tier takes arbiter, write_through, write_back, write_through_"),
    ("plan TRACE --tier 1B@6GB/s,cache_policy=lur --model 2", "unknown policy 'lur', known ones: lru, arc,"),
    ("plan TRACE --tier 1B@6GB/s,cache_policy=lru,cache_policy=lru --model 2", "--tier takes one cache_policy, got"),
    ("plan TRACE --tier 1B@6GB/s,write_back,write_through --model 2", "--tier takes one write policy, got"),
    ("""plan TRACE --tier '{"type": "disk"}' --model 2""", "--tier of a plan is simulated: SIZE@RATE; kvcache replay"),
    ("plan TRACE --tier 1B@6GB/s --model 2", "--tier must hold at least one block of 1024 bytes, got 1"),
    ("plan TRACE --tier 1T@6GB/s --model 2 --serving price=4", "--serving price must name one price for host"),
    ("plan TRACE --serving link=50", "--serving link must be a rate such as 6GB/s, got '50'"),
    ("plan TRACE --serving engines=0", "--serving engines must be a whole number >= 1"),
    ("plan TRACE --serving nodes=2", "--serving takes engines=N, link=RATE and price=HOST/TIER/..., got 'nodes=2'"),
    ("plan none.jsonl --groups full,swa:0", "--groups: the window of swa must be a whole number >= 1"),
    ("plan none.jsonl --groups full,window:1", "--groups takes full, swa:BLOCKS and mamba, as in full,swa:1, or a "),
    ("plan none.jsonl --groups full", "--groups needs one full group and at least one other, got full in 'full'"),
    ("plan none.jsonl --groups full" + ",mamba" * 64, "--groups: keys name at most 64 groups, got 65"),
    ("plan none.jsonl --groups full,mamba,retention=16", "--groups: retention must be 0 or null, got '16'"),
    ("plan none.jsonl --groups none.json", "model config 'none.json' cannot be read: No such file or directory"),
    ("plan none.jsonl --groups full,mamba --policy lru,min", "--groups plans whole traces: leave out --sample"),
    ("plan TRACE --target ttft=1", "--target takes numbers > 0 for ttft_mean, ttft_p50, ttft_p99, dwpd"),
    ("plan TRACE --target ttft_p99=1", "--target ttft_p99=1 needs a model with a known number of parameters"),
    ("plan TRACE --target dwpd=1", "--target dwpd=1: dwpd needs a --tier"),
    ("plan TRACE --sample 0", "--sample must be a share > 0 and <= 1, got 0.0"),
    ("plan TRACE --tier 1T@1GB/s,arbiter --model 2", "--tier ...,arbiter weighs loading against computing: it needs"),
    (
        "plan TRACE --tier 1T@1GB/s,arbiter --model llama-3.1-8b --sample 0.5",
        "--tier ...,arbiter needs whole prefixes: leave out --sample, got 0.5",
    ),
    ("replay nowhere.jsonl", "cannot open trace nowhere.jsonl: No such file or directory"),
    ("replay TRACE --policy fifo", "unknown policy 'fifo', known ones: lru, arc"),
    ("replay TRACE --blocks 0", "--blocks must be a whole number >= 1, such as 10000 or '10k', got '0'"),
    ("replay TRACE --model 70b", "--model 70b may mean parameters; name the model"),
    ("replay TRACE --memory 256GiB", "--memory needs the size of a block, got '256GiB' alone: --model names it"),
    ("replay TRACE --memory 4GiX --block-bytes 64K", f"--memory {SIZE}, got '4GiX'"),
    ("replay TRACE --memory 1K --block-bytes 64K", "--memory must hold at least one block of 65536 bytes, got '1K'"),
    ("replay TRACE --memory 1G --blocks 4 --block-bytes 1K", "--blocks and --memory exclude each other, got '4' and"),
    ("replay TRACE --block-bytes -1", f"--block-bytes {SIZE}, got '-1'"),
    ("replay TRACE --block-size :7", "--block-size: 7 tokens must divide the 512 of a listed block (1, 2, 4, 8, 16"),
    ("replay TRACE --store-threshold -1", "--store-threshold must be >= 0, got -1"),
    ("replay TRACE --policy lru,arc", "--policy must name one policy, got 'lru,arc': kvcache plan FILE compares"),
    ("replay TRACE --blocks 1,2", "one capacity is needed here, got '1,2': kvcache plan FILE compares several"),
    ("replay TRACE --tier 1TiB@6GB/s", "--tier SIZE@RATE is simulated by kvcache plan; a replay takes PATH:SIZE or"),
    ("replay TRACE --tier 5GiB", "--tier must be PATH:SIZE, as in /mnt/nvme/kv:100GiB, or JSON, got '5GiB'"),
    ("replay TRACE --tier x:y", "--tier must be bytes >= 1 or a size"),
    ("replay TRACE --json missing/out.json", "--json cannot be written: 'missing/out.json': No such file or directory"),
    ("replay TRACE --blocks 536870912 --model llama-3.1-8b", "a pool of ... bytes ... ; --no-data needs none"),
    *((f"tier {name} .", " ... is no disk tier") for name in ("inspect", "verify", "compact")),
    *(
        (f"tier {name} valkey://user:secret@127.0.0.1:1", " ... must be the folder of a disk tier, not a URL")
        for name in ("inspect", "verify", "compact")
    ),
    ("tier clear missing --yes", " ... must be"),
    ("tier clear . --yes --cluster", " ... need the URL of a server"),
    ("top --url http://x", "--url was removed: use `curl http://x`, or the dashboard"),
    ("top --interval 0 --once", "--interval must be 0.1 to 3600 seconds"),
    (
        "replay TRACE --no-data --tier kv:1TiB --memory 512TiB --block-bytes 1GiB",
        "a pool of 562949953421312 bytes (524288.0 GiB) does not fit into host memory ... "
        "; kvcache plan --tier 1TiB@6GB/s simulates a tier of any size",
    ),
]
BAD_CHAT = [
    ("chat-demo --turns 0", "--turns must be >= 1, got 0"),
    ("chat-demo --seed -1", "--seed must be >= 0, got -1"),
    ("chat-demo --policy lro", "unknown policy 'lro'"),
    ("chat-demo --plot missing/chat.png", "--save cannot be written: 'missing/chat.png'"),
]


@pytest.mark.parametrize(
    ("line", "message"),
    [*BAD, *(pytest.param(*row, marks=pytest.mark.slow) for row in BAD_CHAT)],
    ids=[line for line, _ in BAD + BAD_CHAT],
)
def test_command_with_bad_option_writes_nothing(run, write_trace, line, message, monkeypatch, tmp_path):
    trace = write_trace([[0, 1], [2, 3], [0, 1, 4]])
    monkeypatch.chdir(tmp_path)
    status, _, err = run(*shlex.split(line.replace("TRACE", str(trace))))
    assert status == 2
    assert "Traceback" not in err
    assert "secret" not in err
    (error,) = [one for one in err.splitlines() if "error" in one]
    beginning, *rest = message.split(" ... ")
    assert error.startswith(f"kvcache: error: {beginning}")
    assert all(part in error for part in rest)
    assert list(tmp_path.iterdir()) == [trace]
