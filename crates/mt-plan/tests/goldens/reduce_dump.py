#!/usr/bin/env python3
"""Reduces what libtpu dumps of a small program to what its time by the schedule is read from.

usage: reduce_dump.py DIR OUT.txt.gz EXPECTED.json --reference REFERENCE.py

DIR comes from
  LIBTPU_INIT_ARGS="--xla_jf_dump_to=DIR/llo --xla_jf_dump_llo_text=true
                    --xla_jf_dump_llo_pass_label_regex=final_bundles"
  maxtext compile compile_topology=v5e-4 dataset_type=synthetic base_emb_dim=128 base_mlp_dim=256
      base_num_query_heads=2 base_num_kv_heads=2 head_dim=64 base_num_decoder_layers=2 vocab_size=256
      ici_fsdp_parallelism=4 max_target_length=256 per_device_batch_size=1 attention=flash
      remat_policy=full dump_hlo=true dump_hlo_local_dir=DIR

OUT.txt.gz holds the files, each behind a line `==> path <==`: the module without attributes that nothing reads, and the
bundles of the operations with the shortest schedules, without instructions that nothing reads. EXPECTED.json holds the
sums that the reference, an independent script, computes from the reduced dump.
"""
import argparse, glob, gzip, json, os, re, runpy, sys, tempfile

parser = argparse.ArgumentParser()
parser.add_argument("dir")
parser.add_argument("out")
parser.add_argument("expected")
parser.add_argument("--reference", required=True)
parser.add_argument("--bytes", type=int, default=24000, help="the most bytes of bundles")
arguments = parser.parse_args()


def module(text):
    lines = []
    fused = set(re.findall(r"fusion\(.*calls=%([\w.\-]+)", text))
    within = ""
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line)
        if header:
            within = header[2]
            lines.append(re.sub(r" \(.*\{$", " () -> () {", line))
            continue
        if not re.match(r"  (ROOT )?%", line):
            if line == "}":
                lines.append(line)
            continue
        kept = re.findall(
            r", (?:calls|body|condition|to_apply|true_computation|false_computation)=%[\w.\-]+"
            r"|, branch_computations=\{[^}]*\}|, replica_groups=mesh\[[^\]]*\] \{[^}]*\}|, replica_groups=[^ ]*",
            line,
        )
        if within not in fused:
            name = re.search(r'op_name="[^"]*"', line)
            read = re.findall(
                r'"estimated_cycles":"\d+"|"iteration_bounds":\[[^\]]*\]|known_trip_count[^\d]*\d+', line
            )
            kept += [f", metadata={{{name[0]}}}"] if name else []
            kept += [f", backend_config={{{','.join(read)}}}"] if read else []
        start = line.index(" = ")
        # The operands end where the attributes begin: `), name=`, or with the line.
        end = re.search(r"\), \w+=", line[start:])
        body = line[: start + end.start() + 1] if end else line
        body = re.sub(r"\{[\d,]*(?::[^{}]*?(S\(\d+\))?)?\}", lambda m: "{:" + m[1] + "}" if m[1] else "", body)
        lines.append(body + "".join(kept))
    return "\n".join(lines) + "\n"


def bundles(path):
    lines = []
    for line in open(path, errors="replace"):
        head = re.match(r"\s*(0x[0-9a-f]+|\d+)\s+([A-Z ]*):\s([> ]*)\{", line)
        if not head:
            continue
        kept = re.findall(
            r"vmatmul[\w.]*|vdelay \d+|%p\d+_p\d+ = scmp\.(?:ge|lt|eq|ne)\.s32\.totalorder %s\w+, \d+"
            r"|sbr\.rel \(!%p\d+_p\d+\) target = \$region\w*|sbr\.rel \(!%p\d+_p\d+\)",
            line,
        )
        body = "{}" if re.search(r":\s+\{\}", line) else "{ " + " ; ".join(kept) + " }"
        lines.append(f"{head[1]} {head[2].strip()}: {head[3].strip()} {body}")
    return re.sub(r" +", " ", "\n".join(lines)) + "\n"


text = max(
    (path for path in glob.glob(arguments.dir + "/**/*after_codegen.txt", recursive=True) if "llo" not in path),
    key=os.path.getsize,
)
files = {"modules/module.after_codegen.txt": module(open(text).read())}
schedules = {}
for path in glob.glob(arguments.dir + "/llo/*final_bundles.txt"):
    name = re.match(r"\d+-(.*)-\d+-final_bundles.txt", os.path.basename(path))
    if name and "schedule-analysis" not in path and re.search(rf"%{re.escape(name[1])} = ", files["modules/module.after_codegen.txt"]):
        schedules[name[1]] = bundles(path)
size = 0
# The longest that fit beside all shorter ones: loops are in long schedules.
for name, schedule in sorted(schedules.items(), key=lambda item: len(item[1])):
    if size + len(schedule) > arguments.bytes:
        break
    size += len(schedule)
    files[f"llo/1-{name}-01-final_bundles.txt"] = schedule
content = "".join(f"==> {path} <==\n{content}" for path, content in files.items())
with open(arguments.out, "wb") as out:
    out.write(gzip.compress(content.encode(), mtime=0))

with tempfile.TemporaryDirectory() as directory:
    for path, content in files.items():
        os.makedirs(os.path.dirname(os.path.join(directory, path)), exist_ok=True)
        open(os.path.join(directory, path), "w").write(content)
    sys.argv = [arguments.reference, directory]
    sums = runpy.run_path(arguments.reference, run_name="reference")["agg"]
total = {
    "cycles": sum(each[1] for each in sums.values()),
    "estimated_cycles": sum(each[0] for each in sums.values()),
    "op_runs": sum(each[2] for each in sums.values()),
    "waited_collectives": sums["collectives, waited for"][1],
}
json.dump(total, open(arguments.expected, "w"), indent=1)
print(total, len(files), "files", os.path.getsize(arguments.out), "bytes")
