# SPDX-License-Identifier: Apache-2.0
"""pytest plugin: vLLM's tests find Kairos's classes under vLLM's names."""

import vllm.v1.core.sched.async_scheduler as async_scheduler
import vllm.v1.core.sched.scheduler as scheduler

import vllm_kairos.engine.scheduler as kairos

# vLLM's tests make a scheduler each and never shut one down; with reports on
# they would fight for one port.
kairos.report_address = lambda *_: ""
async_scheduler.AsyncScheduler = kairos.AsyncKairosScheduler
scheduler.Scheduler = kairos.KairosScheduler
