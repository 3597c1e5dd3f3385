# SPDX-License-Identifier: Apache-2.0
"""The quick start: real engines, the bundled proxy, a measured comparison."""
