"""Memory figures of a running process: the sampler, and its sources in the kernel, NVML and CUPTI."""
