// SPDX-License-Identifier: GPL-2.0
/*
 * Announces virtio-mmio devices to a Xen PV guest, and lets an idle one sleep.
 *
 * Such a guest has no ACPI, no device tree, and a kernel without virtio_mmio's
 * command-line devices. The VMM therefore describes the devices in parameters
 * of this module: device i has its registers at base + i * stride and raises
 * Xen event channel port + i.
 *
 * The devices exist as long as the machine. Without a module_exit the kernel
 * refuses to unload the module.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/err.h>
#include <linux/ioport.h>
#include <linux/kprobes.h>
#include <linux/module.h>
#include <linux/platform_device.h>
#include <xen/events.h>
#include <xen/xen.h>

/* The registers of all devices share one page, which holds this many. */
#define MAX_DEVICES 8

static unsigned long base;
module_param(base, ulong, 0444);
MODULE_PARM_DESC(base, "guest-physical address of the first device's registers");
static unsigned long stride = 0x200;
module_param(stride, ulong, 0444);
MODULE_PARM_DESC(stride, "bytes from one device's registers to the next");
static unsigned int count;
module_param(count, uint, 0444);
MODULE_PARM_DESC(count, "number of devices");
static unsigned int port;
module_param(port, uint, 0444);
MODULE_PARM_DESC(port, "event channel of the first device");

static int __init announce(unsigned int i)
{
	unsigned long start = base + i * stride;
	int irq = bind_evtchn_to_irq(port + i);
	struct resource resources[] = {
		DEFINE_RES_MEM(start, stride),
		DEFINE_RES_IRQ(irq),
	};

	if (irq < 0)
		return irq;
	return PTR_ERR_OR_ZERO(platform_device_register_simple(
		"virtio-mmio", i, resources, ARRAY_SIZE(resources)));
}

/* The address of tick_nohz_idle_stop_tick(). */
static unsigned long stop_tick;

static int stop_instead(struct kprobe *p, struct pt_regs *regs)
{
	instruction_pointer_set(regs, stop_tick);
	return 1;
}
NOKPROBE_SYMBOL(stop_instead);

/*
 * A kprobe with a post_handler is not optimized into a jump, which would ignore
 * the new address (Documentation/trace/kprobes.rst), and keeps live patches off.
 */
static void unused(struct kprobe *p, struct pt_regs *regs, unsigned long flags)
{
}
NOKPROBE_SYMBOL(unused);

static struct kprobe retain = {
	.symbol_name = "tick_nohz_idle_retain_tick",
	.pre_handler = stop_instead,
	.post_handler = unused,
};

/*
 * The idle loop of recent 6.1 kernels stops the tick of a CPU without a cpuidle
 * driver, which a Xen PV kernel cannot have, only after a tick that came while
 * the CPU was idle. So each wake-up of an idle guest costs another one within
 * 4 ms. This makes the loop stop the tick at once, as it did before.
 */
static void __init stop_tick_at_once(void)
{
	/* Disabled: it only looks up the address and changes no code. */
	struct kprobe stop = {
		.symbol_name = "tick_nohz_idle_stop_tick",
		.flags = KPROBE_FLAG_DISABLED,
	};
	int err = register_kprobe(&stop);

	if (!err) {
		stop_tick = (unsigned long)stop.addr;
		unregister_kprobe(&stop);
		err = stop_tick ? register_kprobe(&retain) : -ENOENT;
	}
	if (err)
		pr_info("the tick of an idle CPU stops late: error %d\n", err);
}

static int __init cube_mmio_init(void)
{
	unsigned int i;
	int err;

	if (!xen_pv_domain())
		return -ENODEV;
	if (!base || !port || !stride || !count || count > MAX_DEVICES) {
		pr_err("base, port and stride must not be zero, count must be 1 to %d\n",
		       MAX_DEVICES);
		return -EINVAL;
	}
	stop_tick_at_once();
	for (i = 0; i < count; i++) {
		err = announce(i);
		if (err)
			pr_err("device %u: error %d\n", i, err);
	}
	return 0;
}
module_init(cube_mmio_init);

MODULE_DESCRIPTION("virtio-mmio devices and a quiet tick of a cube-vmm guest");
MODULE_LICENSE("GPL");
