"""The part that scripts which stand in for ranks share: signals and files of `pretrain train`."""

BEGIN = """
import faulthandler, json, os, signal, sys, time
asked = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, frame: asked.append(number))
faulthandler.register(signal.SIGUSR2)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2])
attempt = os.environ['PRETRAIN_ATTEMPT']
run, number = os.path.dirname(os.path.dirname(attempt)), int(os.path.basename(attempt))
def write(path, text):
    open(path + '.new', 'w').write(text)
    os.rename(path + '.new', path)
count = 0
def progress(phase):
    global count
    count += 1
    write(attempt + '/progress', json.dumps(dict(count=count, step=step, phase=phase)))
def phase(phase):
    line = dict(at=time.time(), phase=phase, step=step)
    open(attempt + '/phases.jsonl', 'a').write(json.dumps(line) + chr(10))
    progress(phase)
def save():
    folder = run + f'/checkpoints/step-{step:08d}'
    os.makedirs(folder, exist_ok=True)
    branches = [dict(id='b', since=0)]
    ancestry = dict(id=os.urandom(8).hex(), step=step, parent=None, branches=branches)
    write(folder + '/manifest.json', json.dumps(ancestry))
def is_saved(name):
    return os.path.exists(run + f'/checkpoints/{name}/manifest.json')
saved = os.listdir(run + '/checkpoints') if os.path.exists(run + '/checkpoints') else []
step = max([int(name[5:]) for name in saved if is_saved(name)], default=0)
"""
