"""A network on the NPU's integers: captured, its quantisers placed by HTP's rules, calibrated from pictures.

The door is ``lumen_lab.quantize``; in this room it is ``quantize.quantize``.
"""
