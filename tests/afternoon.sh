# The first afternoon with a repository that is not ours: `sh tests/afternoon.sh` in an empty folder, with `recipe` in PATH.  Each line: command, exit code, a word.
try() { got=$(eval "$1" 2>&1); code=$?; [ $code = "$2" ] && printf %s "$got" | grep -q -- "$3" && return; printf '%s\n-> %s, wanted %s and "%s"\n%s\n' "$1" $code "$2" "$3" "$got"; exit 1; }
mkdir -p .git configs src/pkg && cd src
printf 'from .util import scale\ndef loss(lr, n):\n    return scale(1 / (1 + lr * n))\n' > pkg/model.py
printf 'def scale(x):\n    return round(x, 4)\n' > pkg/util.py && : > pkg/__init__.py
printf 'import os, sys\nfrom pkg.model import loss\nprint("project", os.environ["PROJECT"])\nlr = float(sys.argv[1])\nfor n in range(5):\n    print(f"step {n} val_loss {loss(lr, n)}")\nopen(sys.argv[2], "w").write(sys.prefix)\n' > train.py
printf 'PROJECT=mine\n' > ../.env && python3 -m venv --without-pip ../.venv
cat > ../configs/sweep.yaml <<'E2'
recipe: sweep@1
inputs: {size: {type: integer, default: 8}}
steps:
  train:
    matrix: {lr: [0.1, 0.2, 0.3]}
    run: python src/train.py {{ matrix.lr }} {{ outputs.model }} {{ inputs.size }}
    code: [../src/train.py]
    outputs: {model: "runs/{{ matrix.lr }}.txt"}
E2
try 'recipe validate ../configs/sweep.yaml' 0 'src/train.py imports pkg.model, which `code` does not list'
try 'recipe run ../configs/sweep.yaml -j1' 1 'or write `code: auto`'
sed -i 's/code: .*/code: auto/' ../configs/sweep.yaml
try 'recipe run ../configs/sweep.yaml -j1' 1 'PROJECT is in .env: add `env_file: .env`'
printf 'env_file: .env\n' >> ../configs/sweep.yaml
try 'recipe run ../configs/sweep.yaml' 0 '3 ran'
try 'cat ../runs/0.1.txt' 0 "$(cd .. && pwd -P)/.venv"
try 'ls -a . ../configs | grep -c [.]recipe$' 1 0
try 'cat ../.recipe/.gitignore' 0 '*'
try 'cd pkg && recipe run ../../configs/sweep.yaml' 0 'everything is fresh'
sed -i 's/^env_file/    metrics: {pattern: "step (?P<step>\\\\d+) val_loss (?P<val_loss>\\\\S+)"}\n  best: {select: train, min: val_loss}\nenv_file/' ../configs/sweep.yaml
try 'recipe run ../configs/sweep.yaml' 0 'everything is fresh'
try 'recipe report' 0 'train\[lr=0.3\] *0.4545'
try 'recipe run ../configs/sweep.yaml --size 9' 3 'write size=9'
echo mine > ../runs/0.1.txt
try 'recipe run ../configs/sweep.yaml' 2 'runs/0.1.txt, which was edited after sweep@1 created it'
try 'recipe run ../configs/sweep.yaml --overwrite -B' 0 '3 ran'
try 'recipe diff' 0 'sweep@1'
try "recipe why 'train[lr=0.1]'" 0 'python '
try 'echo "size: 9" > ../params.yaml && recipe show ../configs/sweep.yaml --values -i ../params.yaml' 0 'size *9 *../params.yaml'
try 'recipe sweep ../configs/sweep.yaml size=8,16 --min val_loss' 0 '^[*] .*0.4545'
try ': > ../requirements.txt && recipe lock ../requirements.txt' 0 'requirements.lock: 0 packages'
