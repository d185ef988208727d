/* A SPANK plugin with the options of NVIDIA's pyxis, for the tests' cluster.
 *
 * Like pyxis, it adds --container-image, --container-mounts and --container-workdir to srun and
 * sbatch, and runs the tasks (of sbatch: the script) in a mount namespace in which
 *  - /tmp of the host is not seen, except for what --container-mounts names,
 *  - the working directory is the image's ("/") unless --container-workdir names another,
 *  - PATH is the image's, and
 *  - with PYTORCH_VERSION, which NVIDIA's PyTorch images set, there are also torchrun's variables
 *    RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which enroot's hook
 *    50-slurm-pytorch.sh and pyxis set there. An image whose name holds "pytorch" is such a one.
 * Unlike in pyxis, the rest of the file system is the host's. /etc/os-release has the image's name.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <slurm/spank.h>

SPANK_PLUGIN(pyxis, 1)

#define NUM_MOUNTS 64
#define IMAGE_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

enum { IMAGE, MOUNTS, WORKDIR, NUM_OPTIONS };
static char *values[NUM_OPTIONS];

struct mount {
	int source;
	char target[PATH_MAX];
};

static int keep(int option, const char *argument, int remote)
{
	(void)remote;
	free(values[option]);
	values[option] = strdup(argument);
	return values[option] ? 0 : -1;
}

static struct spank_option options[] = {
	{"container-image", "[USER@][REGISTRY#]IMAGE[:TAG]|PATH", "[pyxis] the image", 1, IMAGE, keep},
	{"container-mounts", "SRC:DST[:FLAGS][,SRC:DST...]", "[pyxis] bind mounts", 1, MOUNTS, keep},
	{"container-workdir", "PATH", "[pyxis] working directory", 1, WORKDIR, keep},
};

int slurm_spank_init(spank_t sp, int ac, char **av)
{
	(void)ac, (void)av;
	if (spank_context() != S_CTX_LOCAL && spank_context() != S_CTX_ALLOCATOR &&
	    spank_context() != S_CTX_REMOTE)
		return 0;
	for (int i = 0; i < NUM_OPTIONS; i++)
		if (spank_option_register(sp, &options[i]) != ESPANK_SUCCESS)
			return -1;
	return 0;
}

static int failed(const char *what, const char *path)
{
	slurm_error("pyxis: %s %s: %s", what, path, strerror(errno));
	return -1;
}

/* Make the directories above `path`. */
static void make_parents(const char *path)
{
	char parent[PATH_MAX];

	snprintf(parent, sizeof(parent), "%s", path);
	for (char *p = parent + 1; (p = strchr(p, '/')); p++) {
		*p = '\0';
		mkdir(parent, 0755);
		*p = '/';
	}
}

/* Open the sources of "SRC[:DST[:FLAGS]],...": the mount on /tmp will hide their paths. */
static int open_sources(char *text, struct mount *mounts)
{
	int count = 0;

	for (char *entry; (entry = strsep(&text, ","));) {
		char *source = strsep(&entry, ":"), *target = strsep(&entry, ":");

		if (count == NUM_MOUNTS || !*source) {
			errno = EINVAL;
			return failed("--container-mounts", source);
		}
		mounts[count].source = open(source, O_PATH | O_CLOEXEC);
		if (mounts[count].source < 0)
			return failed("--container-mounts", source);
		snprintf(mounts[count].target, PATH_MAX, "%s", target ? target : source);
		count++;
	}
	return count;
}

static int mount_source(const struct mount *one)
{
	char source[64];
	struct stat status;

	snprintf(source, sizeof(source), "/proc/self/fd/%d", one->source);
	if (fstat(one->source, &status))
		return failed("cannot read", one->target);
	make_parents(one->target);
	if (S_ISDIR(status.st_mode))
		mkdir(one->target, 0755);
	else
		close(open(one->target, O_CREAT | O_WRONLY | O_CLOEXEC, 0644));
	if (mount(source, one->target, NULL, MS_BIND | MS_REC, NULL))
		return failed("cannot mount", one->target);
	return 0;
}

/* Put a file with the image's name in the place of /etc/os-release. */
static int write_os_release(void)
{
	const char *path = "/tmp/.os-release";
	FILE *file = fopen(path, "w");

	if (!file)
		return failed("cannot write", path);
	fprintf(file, "PRETTY_NAME=\"%s\"\n", values[IMAGE]);
	if (fclose(file) || mount(path, "/etc/os-release", NULL, MS_BIND, NULL) || unlink(path))
		return failed("cannot mount", path);
	return 0;
}

/* Runs as root in each task's process, and in the batch script's. */
int slurm_spank_task_init_privileged(spank_t sp, int ac, char **av)
{
	static struct mount mounts[NUM_MOUNTS];
	int count = 0;

	(void)sp, (void)ac, (void)av;
	if (!values[IMAGE])
		return 0;
	/* An image that is not a path would be downloaded; here every name exists. */
	if (strspn(values[IMAGE], "./") && access(values[IMAGE], R_OK))
		return failed("no such image:", values[IMAGE]);
	if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL))
		return failed("no namespace for", values[IMAGE]);
	if (values[MOUNTS] && (count = open_sources(values[MOUNTS], mounts)) < 0)
		return -1;
	if (mount("tmpfs", "/tmp", "tmpfs", 0, "mode=1777"))
		return failed("cannot mount", "/tmp");
	if (write_os_release())
		return -1;
	for (int i = 0; i < count; i++)
		if (mount_source(&mounts[i]))
			return -1;
	return 0;
}

static void copy(spank_t sp, const char *from, const char *to)
{
	char value[64];

	if (spank_getenv(sp, from, value, sizeof(value)) == ESPANK_SUCCESS)
		spank_setenv(sp, to, value, 1);
}

static void set_torchrun_variables(spank_t sp)
{
	char value[PATH_MAX];

	spank_setenv(sp, "PYTORCH_VERSION", "2.0", 1);
	copy(sp, "SLURM_PROCID", "RANK");
	copy(sp, "SLURM_LOCALID", "LOCAL_RANK");
	copy(sp, "SLURM_NTASKS", "WORLD_SIZE");
	/* enroot names the first of SLURM_STEP_NODELIST; all nodes of the tests have one address. */
	spank_setenv(sp, "MASTER_ADDR", "127.0.0.1", 0);
	if (spank_getenv(sp, "SLURM_JOB_ID", value, sizeof(value)) == ESPANK_SUCCESS) {
		snprintf(value, sizeof(value), "%d", atoi(value) % 4536 + 61000);
		spank_setenv(sp, "MASTER_PORT", value, 0);
	}
}

/* Runs as the user in each task's process, and in the batch script's, right before its program. */
int slurm_spank_task_init(spank_t sp, int ac, char **av)
{
	const char *directory = values[WORKDIR] ? values[WORKDIR] : "/";

	(void)ac, (void)av;
	if (!values[IMAGE])
		return 0;
	if (chdir(directory))
		return failed("cannot change directory to", directory);
	spank_setenv(sp, "PWD", directory, 1);
	spank_setenv(sp, "PATH", IMAGE_PATH, 1);
	if (strstr(values[IMAGE], "pytorch"))
		set_torchrun_variables(sp);
	return 0;
}
